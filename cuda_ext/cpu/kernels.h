// Kernels that more than one op calls, after its checks; defined where their op is.
#pragma once

#include "append.h"
#include "decode_attention.h"

namespace sparse_rl {

template <class T>
void check_room(const Append<T>& op);

template <class T>
void append_rows(const Append<T>& op);

template <class T>
void attend(const Attention<T>& op);

}  // namespace sparse_rl
