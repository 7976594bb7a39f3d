"""The only code that writes.

fs        the seam: single operations on files, replaceable by a crash lab
folder    durable, exclusive, hashed writes; everything else is built on it
scratch   local-first writing for slow targets
space     enough room before the work
mapped    hashing without a copy, for verify
lock      one builder per output, at most, most of the time
log       events.jsonl, which may lose its last line
"""

from tokenmill.storage.folder import Digest, Folder, Output, local_folder
from tokenmill.storage.scratch import ScratchOutput

__all__ = ["Digest", "Folder", "Output", "ScratchOutput", "local_folder"]
