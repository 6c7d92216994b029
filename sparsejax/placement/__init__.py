"""State on a mesh: markers, allocation, shards, another number of workers."""
