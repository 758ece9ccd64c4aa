"""What every compressor costs in quality, beside random eviction and the full cache."""
