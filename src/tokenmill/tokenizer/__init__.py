"""Text to ids.

    name -> resolve -> TokenizerSpec -> open_engine -> Engine: Arrow text in, ids and lengths out
                            |
                            +-> reference (tiktoken, tokenizers): the parity check

`engine` is the only module that imports gigatoken.
"""

from tokenmill.tokenizer.engine import Encoded, Engine, open_engine
from tokenmill.tokenizer.spec import TokenizerSpec, resolve

__all__ = ["Encoded", "Engine", "TokenizerSpec", "open_engine", "resolve"]
