"""Tools for comparisons: simulator, baselines, learners, NPU, the papers' networks, data sets, pictures."""
