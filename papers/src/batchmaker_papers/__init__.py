"""The systems of the five papers that serving does not need: the NPU model, the learners, the planner, cost models."""
