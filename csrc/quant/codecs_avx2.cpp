#define CODECS avx2_codecs
#include "quant/codecs.inc"
