// append_attend: append, then decode_attention. What either refuses is refused before anything is written.

#include "append_attend.h"
#include "backend.h"
#include "kernels.h"

namespace sparse_rl {
namespace {

struct Kernel : Cpu {
  template <class T>
  static void run(const AppendAttend<T>& op, const Tensor&) {
    check_room(op.append);
    check_runs(op.attention.heads, op.attention.max_length - 1, "max_length without the new one", op.attention.pool_rows);
    append_rows(op.append);
    attend(op.attention);
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(sparse_rl, CPU, m) { m.impl("append_attend", TORCH_BOX(&append_attend<Kernel>)); }

}  // namespace sparse_rl
