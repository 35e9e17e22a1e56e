// The ops of namespace mgrpo: their schemas and contracts, and their CPU side.
// Built on LibTorch's stable ABI, so that one build runs under every torch from 2.10 on.
#define TORCH_TARGET_VERSION 0x020a000000000000ULL
#include "bindings/kept.h"
#include "bindings/logprob.h"
#include "bindings/policy_loss.h"

#include <torch/csrc/stable/library.h>

#include <algorithm>

#include "core/kept_cpu.h"
#include "core/logprob_cpu.h"
#include "core/policy_loss_cpu.h"

namespace mgrpo {
namespace {

// Rows per task: enough work to be worth handing to a thread.
int64_t grain_size(int64_t cols) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, cols)); }

void run_stats(const StatsArgs& args, const Tensor&) {
  for (int64_t i = 0; args.rows && i < args.n; ++i)
    STD_TORCH_CHECK(args.rows[i] >= 0 && args.rows[i] < args.slice.tokens, "rows[", i, "]=", args.rows[i],
                    " is outside [0, ", args.slice.tokens, ")");
  torch::stable::parallel_for(0, args.n, grain_size(args.slice.valid_cols),
                              [&](int64_t begin, int64_t end) { cpu::stats(args, begin, end); });
}

void run_merge(const MergeArgs& args, const Tensor&) { cpu::merge(args, 0, args.n); }

void run_grad(const GradArgs& args, const Tensor&) {
  for (int64_t row = 0; args.inv_rows && row < args.slice.tokens; ++row)
    STD_TORCH_CHECK(args.inv_rows[row] >= -1 && args.inv_rows[row] < args.n, "inv_rows[", row, "]=", args.inv_rows[row],
                    " is outside [-1, ", args.n, ")");
  torch::stable::parallel_for(0, args.slice.tokens, grain_size(args.slice.cols),
                              [&](int64_t begin, int64_t end) { cpu::grad(args, begin, end); });
}

// Segments must follow each other and cover all n elements, or the kernels would read and write out of bounds.
void check_offsets(const char* name, const int32_t* offsets, int64_t segments, int64_t n) {
  STD_TORCH_CHECK(offsets[0] == 0 && offsets[segments] == n, name, " must reach from 0 to ", n, ", got ", offsets[0],
                  " to ", offsets[segments]);
  for (int64_t s = 0; s < segments; ++s)
    STD_TORCH_CHECK(offsets[s] <= offsets[s + 1], name, "[", s + 1, "]=", offsets[s + 1], " is below ", offsets[s]);
}

// Sets per task: they have some ten entries each.
constexpr int64_t kSetsATask = 512;

void run_kept_stats(const KeptStatsArgs& args, const Tensor& values) {
  check_offsets("offsets", args.sets.offsets, args.sets.n, values.numel());
  torch::stable::parallel_for(0, args.sets.n, kSetsATask,
                              [&](int64_t begin, int64_t end) { cpu::kept_stats(args, begin, end); });
}

void run_kept_grad(const KeptGradArgs& args, const Tensor& values) {
  check_offsets("offsets", args.sets.offsets, args.sets.n, values.numel());
  torch::stable::parallel_for(0, args.sets.n, kSetsATask,
                              [&](int64_t begin, int64_t end) { cpu::kept_grad(args, begin, end); });
}

// One task per sequence; tokens are so cheap that more than one thread pays off only for many of them.
constexpr int64_t kSequencesATask = 8;

void run_policy_loss(const PolicyLossArgs& args, int64_t n, const Tensor&) {
  check_offsets("cu_seqlens", args.cu_seqlens, args.num_seqs, n);
  torch::stable::parallel_for(0, args.num_seqs, kSequencesATask,
                              [&](int64_t begin, int64_t end) { cpu::policy_loss(args, begin, end); });
}

void run_segment_sums(const SegmentSumsArgs& args, int64_t n, const Tensor&) {
  check_offsets("cu_seqlens", args.cu_seqlens, args.num_seqs, n);
  cpu::segment_sums(args, 0, args.num_seqs);
}

}  // namespace

STABLE_TORCH_LIBRARY(mgrpo, m) {
  // logits [tokens, vocab/tp] float32, bfloat16 or float16, unit column stride, columns >= valid_cols never read.
  // targets [n] int64 global ids; rows [n] int64, the logits row of each (None: n = tokens, row i).
  // inv_temp float32, [1] or [n]. Returns [4, n] float32: m, s, w, t of core/logprob.h; w = 0 unless `entropy`.
  m.def(
      "logprob_stats(Tensor logits, Tensor targets, Tensor? rows, int vocab_start, int valid_cols, Tensor inv_temp, "
      "bool entropy) -> Tensor");
  // stats [parts, 4, n], the slices of one vocabulary in any fixed order. Returns logprob [n], entropy [n] (meaningful
  // when the parts were made with `entropy`) and the stats [4, n] of the whole vocabulary.
  m.def("logprob_merge(Tensor stats, Tensor inv_temp) -> (Tensor logprob, Tensor entropy, Tensor merged)");
  // The gradient of sum(g_logprob * logprob + g_entropy * entropy) in this slice's logits, from the merged stats.
  // inv_rows [tokens] int32: entry of each row, -1 for none (None: row i). g_entropy needs stats made with `entropy`.
  // Every column of the result is written; rows without cotangent and padding are zeros. `_` overwrites the logits.
  m.def(
      "logprob_grad_(Tensor(a!) logits, Tensor targets, Tensor? inv_rows, int vocab_start, int valid_cols, "
      "Tensor inv_temp, Tensor stats, Tensor g_logprob, Tensor? g_entropy) -> ()");
  m.def(
      "logprob_grad_out(Tensor logits, Tensor(a!) out, Tensor targets, Tensor? inv_rows, int vocab_start, "
      "int valid_cols, Tensor inv_temp, Tensor stats, Tensor g_logprob, Tensor? g_entropy) -> ()");
  // The same four numbers [4, n] of kept sets in CSR form: values [m] float32, the logits of the entries, -inf where
  // another shard owns them; ids [m] int32 global; offsets [n + 1] int32 from 0 to m; targets and inv_temp as above.
  m.def(
      "kept_stats(Tensor values, Tensor ids, Tensor offsets, Tensor targets, Tensor inv_temp, bool entropy) -> Tensor");
  // The gradient [m] of sum(g_logprob * logprob + g_entropy * entropy) in the values, from the merged stats.
  // g_entropy needs stats made with `entropy`.
  m.def(
      "kept_grad(Tensor values, Tensor ids, Tensor offsets, Tensor targets, Tensor inv_temp, Tensor stats, "
      "Tensor g_logprob, Tensor? g_entropy) -> Tensor");
  // The loss of core/policy_loss.h, each token's times its weight. Vectors are float32, [n] or [num_seqs] (advantages:
  // either); cu_seqlens [num_seqs + 1] int32 reaches from 0 to n. settings: a number for each of MGRPO_POLICY_SETTINGS,
  // in that order. Returns d loss / d logprobs [n], d loss / d seq_log_ratio [num_seqs], and sums [num_seqs, columns],
  // the loss in column 0.
  m.def(
      "policy_loss(Tensor logprobs, Tensor old_logprobs, Tensor? ref_logprobs, Tensor? rollout_logprobs, "
      "Tensor advantages, Tensor weights, Tensor? keep, Tensor cu_seqlens, Tensor? seq_log_ratio, Tensor? seq_log_rho, "
      "Tensor? seq_log_rho_mask, float[] settings) -> (Tensor grad, Tensor seq_grad, Tensor sums)");
  // x [n], weights [n] float32, cu_seqlens [num_seqs + 1] int32 -> [2, num_seqs]: sum of weights x, sum of weights.
  m.def("segment_sums(Tensor x, Tensor weights, Tensor cu_seqlens) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(mgrpo, CPU, m) {
  m.impl("logprob_stats", TORCH_BOX(&logprob_stats<run_stats>));
  m.impl("logprob_merge", TORCH_BOX(&logprob_merge<run_merge>));
  m.impl("logprob_grad_", TORCH_BOX(&logprob_grad_<run_grad>));
  m.impl("logprob_grad_out", TORCH_BOX(&logprob_grad_out<run_grad>));
  m.impl("kept_stats", TORCH_BOX(&kept_stats<run_kept_stats>));
  m.impl("kept_grad", TORCH_BOX(&kept_grad<run_kept_grad>));
  m.impl("policy_loss", TORCH_BOX(&policy_loss<run_policy_loss>));
  m.impl("segment_sums", TORCH_BOX(&segment_sums<run_segment_sums>));
}

}  // namespace mgrpo
