"""vLLM engines, as Ray actors or over HTTP: the only place that imports Ray and vLLM, except for the plugin of the weight sync."""
