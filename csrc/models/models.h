// One function per architecture: binds every tensor and records the graph up to the logits.
#pragma once

#include "models/blocks.h"

namespace delta {

void build_kimi_linear(Builder& b);
void build_kimi_k3(Builder& b);

}  // namespace delta
