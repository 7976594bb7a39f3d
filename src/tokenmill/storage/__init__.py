"""The only code that writes.

fs        the seam: single operations on files, replaceable by a crash lab
output    a file while it is written: hashed, and synced in the end
folder    durable, exclusive writes; everything else is built on it
scratch   local-first writing for slow targets
beside    hashing while a large block is written
space     enough room before the work
mapped    hashing without a copy, for verify
lock      one builder per output, at most, most of the time
log       events.jsonl, which may lose its last line
places    a path or a URL -> a folder

In an object store, which is loaded only for a URL:
urls      which URLs are taken              profile   keys that are not in the environment
store     single requests, retried          remote    ranges in order, fetched ahead
expected  ranges that are known before      objects   a folder of objects
download  one object here, verified         cache     copies of a remote dataset, shared by the processes of a machine

Sources on the hub, which are only read:
hub         what a URL names, and copies    hub_client    requests, and what their errors mean
hub_listing the files of a commit, kept     hub_card      the files of a config
patterns    globs, of the hub and of stores
"""

from tokenmill.storage.base import local_folder, open_folder
from tokenmill.storage.local import Folder
from tokenmill.storage.output import Digest, Output
from tokenmill.storage.scratch import ScratchOutput

__all__ = ["Digest", "Folder", "Output", "ScratchOutput", "local_folder", "open_folder"]
