"""Processes that speak HTTP and gRPC for a server, whose own process then only gathers batches."""
