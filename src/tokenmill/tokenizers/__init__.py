"""Text to ids.

spec      a name -> the tokenizer's content, pinned by a fingerprint
recognise what a tokenizer's file is, by its content
engine    Arrow text in, ids and lengths out; the only module that imports gigatoken
pieces    SentencePiece models, by sentencepiece itself
ragged    how gigatoken takes texts and gives ids, with awkward or with the little of it that it needs
native    errors of libraries in native code
parity    the engine against another implementation of the same tokenizer
hard      the texts on which every engine is compared with its reference
encoded   what an engine takes and gives; light, for those who only pass it on
"""
