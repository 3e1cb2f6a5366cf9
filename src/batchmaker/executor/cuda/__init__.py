"""The CUDA executor: one worker per device, tasks submitted and never waited for."""
