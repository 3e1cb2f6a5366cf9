"""The server: models over HTTP, in the Open Inference Protocol v2 with Triton's extensions."""

from batchmaker.errors import needing

with needing("server", "The server"):
    from batchmaker.server.config import Config, read_config
    from batchmaker.server.formats.audio import Audio
    from batchmaker.server.formats.completions import Completions
    from batchmaker.server.formats.signature import Signature, TensorSpec
    from batchmaker.server.formats.transcriptions import Transcriptions
    from batchmaker.server.run import serve

__all__ = ["Audio", "Completions", "Config", "Signature", "TensorSpec", "Transcriptions", "read_config", "serve"]
