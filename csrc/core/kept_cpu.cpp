#include "core/kept_cpu.h"

namespace mgrpo::cpu {

void kept_stats(const KeptStatsArgs& args, int64_t begin, int64_t end) {
  const KeptSets& sets = args.sets;
  const int64_t n = sets.n;
  for (int64_t i = begin; i < end; ++i) {
    const float inv_temp = sets.inv_temp.data[i * sets.inv_temp.stride];
    float m = -INFINITY, s = 0.f, w = 0.f, t = -INFINITY;
    for (int64_t j = sets.offsets[i]; j < sets.offsets[i + 1]; ++j) {
      m = fmaxf(m, sets.values[j]);
      if (sets.ids[j] == sets.targets[i]) t = sets.values[j];
    }
    for (int64_t j = sets.offsets[i]; j < sets.offsets[i + 1]; ++j) {
      const KeptTerm term = kept_term(sets.values[j], m, inv_temp);
      s += term.e;
      if (args.entropy) w += term.e * term.shifted;
    }
    args.out[i] = m;
    args.out[n + i] = s;
    args.out[2 * n + i] = w;
    args.out[3 * n + i] = t;
  }
}

void kept_grad(const KeptGradArgs& args, int64_t begin, int64_t end) {
  const KeptSets& sets = args.sets;
  for (int64_t i = begin; i < end; ++i) {
    const KeptRowGrad row = kept_row_grad(args, i);
    for (int64_t j = sets.offsets[i]; j < sets.offsets[i + 1]; ++j)
      args.out[j] = kept_grad_entry(row, sets.values[j], sets.ids[j]);
  }
}

}  // namespace mgrpo::cpu
