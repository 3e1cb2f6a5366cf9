"""The server: models over HTTP, in the Open Inference Protocol v2 with Triton's extensions."""

from batchmaker.errors import needing

with needing("server", "The server"):
    from batchmaker.server.audio import Audio
    from batchmaker.server.completions import Completions
    from batchmaker.server.config import Config, read_config
    from batchmaker.server.run import serve
    from batchmaker.server.signature import Signature, TensorSpec
    from batchmaker.server.transcriptions import Transcriptions

__all__ = ["Audio", "Completions", "Config", "Signature", "TensorSpec", "Transcriptions", "read_config", "serve"]
