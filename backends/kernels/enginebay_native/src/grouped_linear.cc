// Products of rows, sorted by group, with the weight [out, in] of their group. The weight of a group is read once for all its
// rows, and not at all when the group has no rows.

#include "padding.h"
#include "products.h"

namespace enginebay {
namespace {

struct Group {
  int64_t index, first, rows;
};

// The groups that have rows, and the total number of rows, at most `rows`.
std::pair<std::vector<Group>, int64_t> groups_of(const int32_t* sizes, int64_t count, int64_t rows) {
  std::vector<Group> groups;
  int64_t first = 0;
  for (int64_t i = 0; i < count; ++i) {
    int64_t size = std::min<int64_t>(std::max(sizes[i], 0), rows - first);
    if (size > 0) groups.push_back({i, first, size});
    first += size;
  }
  return {groups, first};
}

constexpr Sharing kSharing{128 << 10, 4};

template <typename X, typename W>
void run(ffi::ThreadPool& pool, const X* x, const W* w, const int32_t* sizes, const float* scales, float* out,
         int64_t rows, int64_t count, int64_t in, int64_t outputs) {
  auto [every, used] = groups_of(sizes, count, rows);
  std::fill_n(out + used * outputs, (rows - used) * outputs, 0.0f);
  std::vector<Group> groups;
  int64_t most = 0;
  for (Group group : every) {
    group.rows = without_padding(x + group.first * in, group.rows, in, out + group.first * outputs, outputs);
    if (group.rows > 0) groups.push_back(group);
    most = std::max(most, group.rows);
  }
  if (most == 0 || outputs == 0) return;
  int64_t total = outputs * int64_t(groups.size());
  auto [chunk, width] = kSharing.sizes<W>(total, outputs, in, most, pool.num_threads());
  int64_t each = (outputs + chunk - 1) / chunk;
  auto task = [&, chunk = chunk, width = width, groups = groups.data()](int64_t i) {
    Group group = groups[i / each];
    int64_t begin = i % each * chunk, end = std::min(outputs, begin + chunk);
    const W* weight = w + group.index * outputs * in;
    float* to = out + group.first * outputs;
    for (int64_t c = begin; c < end; c += width)
      block(x + group.first * in, weight + c * in, to + c, group.rows, in, std::min(width, end - c), outputs);
    if (scales == nullptr) return;
    for (int64_t r = 0; r < group.rows; ++r)
      for (int64_t c = begin; c < end; ++c) to[r * outputs + c] *= scales[group.index * outputs + c];
  };
  parallel_for(pool, each * int64_t(groups.size()), task);
}

// x [rows, in] f32 and w [groups, out, in] f32, bf16, f16 or int8, or both bf16; sizes [groups]; scales f32 [groups, out], or
// empty -> f32 [rows, out]. Rows after the last group are 0.
ffi::Error grouped_linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w, ffi::Buffer<ffi::S32> sizes,
                          ffi::Buffer<ffi::F32> scales, ffi::ResultBuffer<ffi::F32> out) {
  auto shape = x.dimensions(), weight = w.dimensions();
  if (shape.size() != 2 || weight.size() != 3 || shape[1] != weight[2] ||
      int64_t(sizes.element_count()) != weight[0] ||
      (scales.element_count() != 0 && int64_t(scales.element_count()) != weight[0] * weight[1]))
    return ffi::Error::InvalidArgument("grouped_linear wants x [rows, in], w [groups, out, in], a size and scales of each group");
  const float* factors = scales.element_count() ? scales.typed_data() : nullptr;
  auto with = [&](auto* rows, auto* weights) {
    run(pool, rows, weights, sizes.typed_data(), factors, out->typed_data(), shape[0], weight[0], shape[1], weight[1]);
    return ffi::Error::Success();
  };
  const void* data = w.untyped_data();
  if (x.element_type() == ffi::BF16 && w.element_type() == ffi::BF16)
    return with(static_cast<const bf16*>(x.untyped_data()), static_cast<const bf16*>(data));
  if (x.element_type() == ffi::F32) {
    const float* rows = x.typed_data<float>();
    if (w.element_type() == ffi::F32) return with(rows, static_cast<const float*>(data));
    if (w.element_type() == ffi::S8) return with(rows, static_cast<const int8_t*>(data));
    if (w.element_type() == ffi::BF16) return with(rows, static_cast<const bf16*>(data));
    if (w.element_type() == ffi::F16) return with(rows, static_cast<const f16*>(data));
  }
  return ffi::Error::InvalidArgument("grouped_linear wants x of f32, or x and w of bf16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    enginebay_grouped_linear, grouped_linear,
    ffi::Ffi::Bind().Ctx<ffi::ThreadPool>().Arg<ffi::AnyBuffer>().Arg<ffi::AnyBuffer>().Arg<ffi::Buffer<ffi::S32>>()
        .Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());

}  // namespace enginebay
