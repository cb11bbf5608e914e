"""A batch sampler that fills a cap of bytes, and a model of the bytes of a batch."""
