"""A model's number formats and device, and what of torch's compiler it is spared."""
