"""vLLM engines, as Ray actors or over HTTP: the only place that names Ray and vLLM, beside the plugin of the weight sync."""
