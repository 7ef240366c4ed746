// Graphs of the simulated device: what is launched while one is captured does not run, and runs by `replay`.
//
// As on a GPU a capture refuses whatever makes the host wait, uploads and random numbers, and its results hold
// no values until a replay: here every byte of them is 0xFF, which is NaN in floating point.

#pragma once

#include <ATen/ATen.h>

#include <functional>
#include <vector>

namespace sim {

// A launch that was kept: what runs it again, and the seconds that its kernel takes.
struct Node {
  std::function<void()> run;
  double seconds;
};

struct Captured {
  std::vector<Node> nodes;
};

// What the launches of this thread are kept in; null where they run.
inline thread_local Captured* capturing = nullptr;

inline void refuse_while_capturing(const std::string& what) {
  TORCH_CHECK(capturing == nullptr, "sim: ", what, " is not permitted while a graph is captured");
}

// Zeros, or ones in floating point, of the same sizes and strides: what a kernel is given that must not touch the
// device, to learn the shapes of its results. Ones, because no inverse is refused for them.
inline at::Tensor stand_in(const at::Tensor& host) {
  int64_t last = 0;
  for (int64_t d = 0; d < host.dim(); ++d) {
    if (host.size(d) == 0) return at::empty_strided(host.sizes(), host.strides(), host.options());
    last += (host.size(d) - 1) * host.stride(d);
  }
  auto all = host.is_floating_point() ? at::ones({last + 1}, host.options()) : at::zeros({last + 1}, host.options());
  return all.as_strided(host.sizes(), host.strides());
}

}  // namespace sim

#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define SIM_HAS_GRAPHS 1
#endif
