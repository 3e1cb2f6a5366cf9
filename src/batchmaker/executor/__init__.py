"""Devices: state tables, and running the steps of tasks on the CPU, on GPUs, or without computing."""
