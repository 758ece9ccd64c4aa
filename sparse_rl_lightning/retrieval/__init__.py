"""Pages of the cache that are read instead of entries that are evicted: sampler, record and learner."""
