"""vLLM engines as Ray actors: the only place that names Ray and vLLM, beside the plugin of the weight sync."""
