#define CODECS generic_codecs
#include "quant/codecs.inc"
