"""Text to ids.

spec      a name -> the tokenizer's content, pinned by a fingerprint
engine    Arrow text in, ids and lengths out; the only module that imports gigatoken
ragged    how gigatoken takes texts and gives ids, with awkward or with the little of it that it needs
parity    the engine against another implementation of the same tokenizer
encoded   what an engine takes and gives; light, for those who only pass it on
"""
