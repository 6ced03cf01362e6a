"""jaxinfer: an LLM inference engine in JAX and Pallas for GPUs and TPUs."""
