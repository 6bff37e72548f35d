"""The back end `ray`: learner ranks, samplers and environment workers as Ray actors."""
