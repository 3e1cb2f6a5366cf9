"""For those who compare: simulator, baselines, learners, NPU, the papers' networks, data sets, pictures."""
