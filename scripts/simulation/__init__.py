"""A server under load, simulated: allocators, memory managers, costs, arrivals, and the server."""
