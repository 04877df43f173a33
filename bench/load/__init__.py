"""The load: workloads, clients, streams and the servers they talk to."""
