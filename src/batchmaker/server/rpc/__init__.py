"""gRPC: the Open Inference Protocol v2 (package `inference`) and grpc.health.v1, over the same service as HTTP."""
