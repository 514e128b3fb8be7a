"""Plans the device memory of a run from its configuration and the model's."""
