"""The vLLM connector: the scheduler side decides, the worker side moves."""
