// A simulated accelerator, `sim`, for tests: two devices on the PrivateUse1 key.
//
// Its memory is made of pages that nobody may touch. A kernel opens the pages of its operands, runs the CPU's
// kernel on them in place and closes them again, so results equal the CPU's to the bit, and a host that reads
// a device pointer dies of it as it does on a GPU. Operands on several devices are refused. Every operation
// is counted, and advances a virtual clock that has one hand for the host and one for each device:
//
//     launch    host += launch;   device = max(device, host) + max(kernel, bytes * byte, flops * flop)
//     wait      host = max(host, device) + sync
//     upload    host += launch;   device = max(device, host) + bytes * byte;   then a wait, but for memory that
//               is pinned and a copy that is `non_blocking`
//     replay    host += launch;   device = max(device, host) + the kernels of the graph
//
// The control functions are operators of the namespace `simdev`; device.py gives them names.

#include <ATen/ATen.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <sys/mman.h>
#include <torch/library.h>

#include "graph.h"

#include <map>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
using torch::jit::Stack;

constexpr auto SIM = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex DEVICES = 2;
constexpr size_t GRANULE = 512;  // what allocators of accelerators round up to

struct Block {
  size_t mapped, counted;
  DeviceIndex device;
  int users = 0;
};

struct Counters {
  int64_t launches = 0, reads = 0, uploads = 0, allocations = 0;
};

struct Costs {
  double launch = 5e-6, sync = 20e-6, kernel = 2e-6, byte = 1e-12, flop = 1.0 / 15e12;
};

struct State {
  std::recursive_mutex mutex;
  std::unordered_map<void*, Block> blocks;
  Counters counters[DEVICES];
  int64_t allocated[DEVICES] = {}, peak[DEVICES] = {}, limit[DEVICES] = {INT64_MAX, INT64_MAX};
  Costs costs;
  double host = 0.0, device[DEVICES] = {};
  bool no_double = false;
  std::set<std::string> missing;
  std::vector<std::string> log;
  bool logging = false;
  std::map<const char*, size_t> pinned;  // host memory that copies need not wait for, with its bytes
};

State& state() {
  static auto* value = new State();  // never destroyed: tensors may outlive static objects
  return *value;
}

using Lock = std::lock_guard<std::recursive_mutex>;
thread_local DeviceIndex current = 0;

DeviceIndex index_of(Device device) {
  auto index = device.has_index() ? device.index() : current;
  TORCH_CHECK(index >= 0 && index < DEVICES, "sim: invalid device ordinal ", int(index));
  return index;
}

void wait(DeviceIndex index) {
  sim::refuse_while_capturing("a wait of the host");
  auto& s = state();
  s.host = std::max(s.host, s.device[index]) + s.costs.sync;
}

// ---- memory -------------------------------------------------------------------------------------------

void release(void* address) {
  if (address == nullptr) return;
  auto& s = state();
  Lock lock(s.mutex);
  auto found = s.blocks.find(address);
  s.allocated[found->second.device] -= found->second.counted;
  munmap(address, found->second.mapped);
  s.blocks.erase(found);
}

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t bytes) override { return allocate_on(bytes, current); }

  c10::DataPtr allocate_on(size_t bytes, DeviceIndex index) {
    Device device(SIM, index);
    if (bytes == 0) return {nullptr, nullptr, &release, device};
    auto& s = state();
    Lock lock(s.mutex);
    int64_t counted = (bytes + GRANULE - 1) / GRANULE * GRANULE;
    TORCH_CHECK_WITH(
        OutOfMemoryError, s.allocated[index] + counted <= s.limit[index], "sim:", int(index),
        " is out of memory. Tried to allocate ", bytes, " bytes; ", s.allocated[index], " of ", s.limit[index],
        " bytes are in use.");
    size_t mapped = (bytes + 4095) / 4096 * 4096;
    void* address = mmap(nullptr, mapped, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, address != MAP_FAILED, "sim: the host has no memory for the device");
    s.blocks[address] = {mapped, size_t(counted), index};
    s.allocated[index] += counted;
    s.peak[index] = std::max(s.peak[index], s.allocated[index]);
    s.counters[index].allocations++;
    return {address, address, &release, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void*, const void*, size_t) const override { TORCH_CHECK(false, "sim: no raw copies"); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const c10::DataPtr&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex index) override {
    auto& s = state();
    Lock lock(s.mutex);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto& bytes = stats.allocated_bytes[0];  // the first entry of the array is the aggregate
    bytes.current = s.allocated[index];
    bytes.peak = s.peak[index];
    stats.reserved_bytes[0] = bytes;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex index) override {
    auto& s = state();
    Lock lock(s.mutex);
    s.peak[index] = s.allocated[index];
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
    auto& s = state();
    return {size_t(s.limit[index] - s.allocated[index]), size_t(s.limit[index])};
  }
};

Allocator& allocator() {
  static auto* value = new Allocator();
  return *value;
}
REGISTER_ALLOCATOR(SIM, &allocator())

// Host memory that is pinned: the CPU's, remembered.
struct PinnedAllocator final : at::HostAllocator {
  static void release_pinned(void* address) {
    {
      Lock lock(state().mutex);
      state().pinned.erase(static_cast<const char*>(address));
    }
    free(address);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* address = aligned_alloc(64, (bytes + 64) / 64 * 64);
    Lock lock(state().mutex);
    state().pinned[static_cast<const char*>(address)] = bytes;
    return {address, address, &release_pinned, at::kCPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t bytes) const override { memcpy(to, from, bytes); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

PinnedAllocator& pinned_allocator() {
  static auto* value = new PinnedAllocator();
  return *value;
}
REGISTER_HOST_ALLOCATOR(SIM, &pinned_allocator())

bool is_pinned(const void* address) {
  auto& s = state();
  Lock lock(s.mutex);
  auto found = s.pinned.upper_bound(static_cast<const char*>(address));
  if (found == s.pinned.begin()) return false;
  --found;
  return static_cast<const char*>(address) < found->first + std::max<size_t>(found->second, 1);
}

// Pages that a kernel may touch while this lives.
class Opened {
 public:
  ~Opened() {
    Lock lock(state().mutex);
    for (void* address : addresses_) protect(address, -1, PROT_NONE);
  }
  void add(void* address) {
    if (address == nullptr) return;
    Lock lock(state().mutex);
    protect(address, 1, PROT_READ | PROT_WRITE);
    addresses_.push_back(address);
  }

 private:
  static void protect(void* address, int change, int rights) {
    auto& block = state().blocks.at(address);
    int before = block.users;
    block.users += change;
    if (before == 0 || block.users == 0) mprotect(address, block.mapped, rights);
  }
  std::vector<void*> addresses_;
};

void check_type(at::ScalarType type) {
  TORCH_CHECK_TYPE(
      !state().no_double || (type != at::kDouble && type != at::kComplexDouble),
      "Cannot make a sim tensor of ", type, ": this device has no float64. Please use float32 instead.");
}

Tensor empty_strided_on(at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType type, Device device) {
  check_type(type);
  auto before = current;
  current = index_of(device);
  c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  try {
    Tensor made = at::detail::empty_strided_generic(sizes, strides, &allocator(), keys, type);
    current = before;
    return made;
  } catch (...) {
    current = before;
    throw;
  }
}

// ---- CPU tensors on the device's memory ----------------------------------------------------------------

class Aliases {
 public:
  Tensor of(const Tensor& tensor) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(storage);
    if (found == storages_.end()) {
      void* address = storage->mutable_data();
      opened_.add(address);
      c10::Storage twin(
          c10::Storage::use_byte_size_t(), storage->nbytes(), c10::DataPtr(address, at::kCPU),
          c10::GetAllocator(at::kCPU), /*resizable=*/true);
      found = storages_.emplace(storage, std::move(twin)).first;
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(found->second), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
    auto* impl = alias.unsafeGetTensorImpl();
    impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
    return alias;
  }

 private:
  Opened opened_;
  std::unordered_map<c10::StorageImpl*, c10::Storage> storages_;
};

bool on_sim(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == SIM; }

Tensor to_sim(const Tensor& host, Device device) {
  auto strides = host.is_non_overlapping_and_dense() ? host.strides().vec()
                                                     : at::infer_dense_strides(host.sizes(), host.strides());
  Tensor made = empty_strided_on(host.sizes(), strides, host.scalar_type(), device);
  Aliases aliases;
  aliases.of(made).copy_(host);
  return made;
}

void resize_on_sim(const Tensor& tensor, at::IntArrayRef sizes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  size_t needed = at::detail::computeStorageNbytesContiguous(
      sizes, tensor.dtype().itemsize(), tensor.storage_offset());
  if (needed > storage->nbytes()) {
    c10::DataPtr old;  // outlives `opened`, which closes its pages
    auto grown = allocator().allocate_on(needed, tensor.device().index());
    Opened opened;
    opened.add(grown.get());
    opened.add(storage->mutable_data());
    if (storage->nbytes() > 0) memcpy(grown.get(), storage->data(), storage->nbytes());
    old = storage->set_data_ptr(std::move(grown));
    storage->set_nbytes(needed);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
}

// ---- random numbers ------------------------------------------------------------------------------------

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(DeviceIndex index) {
    device_ = Device(SIM, index);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};

std::vector<at::Generator>& generators() {
  static auto* all = new std::vector<at::Generator>{
      at::make_generator<Generator>(DeviceIndex(0)), at::make_generator<Generator>(DeviceIndex(1))};
  return *all;
}

// While this lives the CPU's own generator is in the state of the device's, and advances it.
class Seeded {
 public:
  explicit Seeded(at::Generator device)
      : lock_(state().mutex), device_(std::move(device)), host_(at::detail::getDefaultCPUGenerator()) {
    before_ = host_.get_state();
    host_.set_state(device_.get_state());
  }
  ~Seeded() {
    device_.set_state(host_.get_state());
    host_.set_state(before_);
  }

 private:
  Lock lock_;
  at::Generator device_, host_;
  Tensor before_;
};

// ---- a launch -------------------------------------------------------------------------------------------

double flops_of(const std::string& name, const std::vector<Tensor>& in, double elements) {
  static const std::set<std::string> products{
      "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm", "aten::addmm_"};
  if (products.count(name) != 0 && in.size() >= 2) {
    const auto& left = in[name.find("add") == std::string::npos ? 0 : 1];
    return left.dim() >= 2 ? 2.0 * elements * double(left.size(-1)) : elements;
  }
  if (name.find("linalg") != std::string::npos || name.find("cholesky") != std::string::npos) {
    const auto& a = in.front();
    return a.dim() >= 2 ? 2.0 * double(a.numel()) * double(a.size(-1)) : elements;
  }
  return elements;
}

double kernel_seconds(double bytes, double flops) {
  const auto& costs = state().costs;
  return std::max({costs.kernel, bytes * costs.byte, flops * costs.flop});
}

void count_kernel(const std::string& name, DeviceIndex index, double kernel) {
  auto& s = state();
  Lock lock(s.mutex);
  s.counters[index].launches++;
  s.host += s.costs.launch;
  s.device[index] = std::max(s.device[index], s.host) + kernel;
  if (s.logging) s.log.push_back("launch " + name);
}

void count_launch(const std::string& name, DeviceIndex index, double bytes, double flops) {
  count_kernel(name, index, kernel_seconds(bytes, flops));
}

void count_read(const std::string& name, DeviceIndex index) {
  sim::refuse_while_capturing("a read, by " + name + ",");
  auto& s = state();
  Lock lock(s.mutex);
  s.counters[index].reads++;
  wait(index);
  if (s.logging) s.log.push_back("read " + name);
}

void count_upload(const std::string& name, DeviceIndex index, double bytes, bool blocking) {
  sim::refuse_while_capturing("an upload, by " + name + ",");
  auto& s = state();
  Lock lock(s.mutex);
  s.counters[index].uploads++;
  s.host += s.costs.launch;
  s.device[index] = std::max(s.device[index], s.host) + bytes * s.costs.byte;
  if (blocking) wait(index);
  if (s.logging) s.log.push_back((blocking ? "blocking upload " : "upload ") + name);
}

class Launch {
 public:
  Launch(const c10::OperatorHandle& op) : name_(op.schema().name()) {
    auto& missing = state().missing;
    TORCH_CHECK_NOT_IMPLEMENTED(
        missing.empty() || missing.count(name_) == 0, "The operator '", name_,
        "' is not currently implemented for the sim device.");
  }

  // The argument for the CPU's kernel.
  IValue argument(const IValue& value) {
    if (value.isTensor()) return tensor(value.toTensor());
    if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& each : value.toTensorVector()) made.push_back(tensor(each));
      return made;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const auto& each : value.toOptionalTensorVector())
        made.push_back(each.has_value() ? std::optional<Tensor>(tensor(*each)) : std::nullopt);
      return made;
    }
    if (value.isDevice()) {
      note(value.toDevice());
      return Device(at::kCPU);
    }
    if (value.isGenerator()) {
      generator_ = value.toGenerator();
      return IValue();
    }
    return value;
  }

  Device device() const { return *device_; }
  const std::optional<at::Generator>& generator() const { return generator_; }

  void operands_seen() {
    if (!device_.has_value()) device_ = Device(SIM, current);
    for (const Tensor& host : hosts_) {
      // An index may come from the host, as on other accelerators. `index` has sent a copy over already, to
      // know the shape of its result; `index_put` has not.
      if (name_.rfind("aten::index", 0) == 0) continue;
      if (name_.rfind("aten::_index_put", 0) == 0)
        count_upload(name_, device_->index(), double(host.nbytes()), true);
      else
        TORCH_CHECK(
            host.dim() == 0, "Expected all tensors to be on the same device, but found at least two devices, ",
            *device_, " and ", host.device(), "! (when running ", name_, ")");
    }
  }

  const std::string& name() const { return name_; }
  const std::vector<Tensor>& inputs() const { return inputs_; }
  const std::vector<std::pair<Tensor, Tensor>>& pairs() const { return pairs_; }

 private:
  void note(Device device) {
    if (device.type() != SIM) return;
    Device whole(SIM, index_of(device));
    TORCH_CHECK(
        !device_.has_value() || *device_ == whole,
        "Expected all tensors to be on the same device, but found at least two devices, ", *device_, " and ",
        whole, "! (when running ", name_, ")");
    device_ = whole;
  }

  Tensor tensor(const Tensor& value) {
    if (!value.defined()) return value;
    if (!on_sim(value)) {
      hosts_.push_back(value);
      return value;
    }
    note(value.device());
    inputs_.push_back(value);
    Tensor alias = aliases_.of(value);
    if (sim::capturing != nullptr) alias = sim::stand_in(alias);
    pairs_.emplace_back(value, alias);
    return alias;
  }

  std::string name_;
  Aliases aliases_;
  std::optional<Device> device_;
  std::optional<at::Generator> generator_;
  std::vector<Tensor> inputs_, hosts_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
};

struct Results {
  Device device;
  double elements = 0.0, bytes = 0.0;
  bool read = false;

  Tensor tensor(const Tensor& host) {
    if (!host.defined()) return host;
    elements += double(host.numel());
    bytes += double(host.nbytes());
    Tensor made = to_sim(host, device);
    if (sim::capturing != nullptr && made.nbytes() > 0) {  // no values before a replay
      Aliases aliases;
      auto all = aliases.of(made);
      memset(all.data_ptr(), 0xFF, all.nbytes());
    }
    return made;
  }

  IValue value(const IValue& host) {
    if (host.isTensor()) return tensor(host.toTensor());
    if (host.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& each : host.toTensorVector()) made.push_back(tensor(each));
      return made;
    }
    read = true;  // a number or a truth value: the host has waited for it
    return host;
  }
};

const IValue& aliased(const c10::FunctionSchema& schema, const Stack& given, const c10::AliasInfo& info) {
  TORCH_CHECK(info.isWrite(), "sim: the view ", schema.name(), " has no kernel; add one to device.cpp");
  for (size_t i = 0; i < given.size(); ++i) {
    const auto* argument = schema.arguments()[i].alias_info();
    if (argument != nullptr && argument->beforeSets() == info.beforeSets()) return given[i];
  }
  TORCH_CHECK(false, "sim: no argument of ", schema.name(), " is its result");
}

void copy_into(const IValue& made, const IValue& host) {
  if (made.isTensor()) {
    if (made.toTensor().defined()) Aliases().of(made.toTensor()).copy_(host.toTensor());
  } else if (made.isTensorList()) {
    auto to = made.toTensorVector(), from = host.toTensorVector();
    for (size_t i = 0; i < to.size(); ++i) Aliases().of(to[i]).copy_(from[i]);
  }
}

// One launch of a graph again, into the memory that its results were given when it was captured.
void launch_again(const c10::OperatorHandle& op, const Stack& given, const Stack& made) {
  Launch launch(op);
  Stack stack;
  for (const IValue& value : given) stack.push_back(launch.argument(value));
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack);
  for (size_t i = 0; i < made.size(); ++i)
    if (op.schema().returns()[i].alias_info() == nullptr) copy_into(made[i], stack[stack.size() - made.size() + i]);
}

// The same memory with the sizes and strides of now, which a tensor may be given others of later.
Tensor as_it_is(const Tensor& tensor) {
  if (!on_sim(tensor)) return tensor;
  return at::native::as_strided_tensorimpl(tensor, tensor.sizes(), tensor.strides(), tensor.storage_offset());
}

Stack as_they_are(Stack values) {
  for (IValue& value : values) {
    if (value.isTensor() && value.toTensor().defined()) {
      value = as_it_is(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> kept;
      for (const Tensor& each : value.toTensorVector()) kept.push_back(as_it_is(each));
      value = kept;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> kept;
      for (const auto& each : value.toOptionalTensorVector())
        kept.push_back(each.has_value() ? std::optional<Tensor>(as_it_is(*each)) : std::nullopt);
      value = kept;
    }
  }
  return values;
}

void launch_boxed(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  Stack given = torch::jit::pop(*stack, schema.arguments().size());
  Launch launch(op);
  for (const IValue& value : given) stack->push_back(launch.argument(value));
  launch.operands_seen();
  Device device = launch.device();
  {
    std::optional<Seeded> seeded;
    if (op.hasTag(at::Tag::nondeterministic_seeded)) {
      sim::refuse_while_capturing("a random number, by " + launch.name() + ",");
      seeded.emplace(launch.generator().value_or(generators()[device.index()]));
    }
    op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  }
  Results results{device};
  Stack returned = torch::jit::pop(*stack, schema.returns().size());
  for (size_t i = 0; i < returned.size(); ++i) {
    const auto* info = schema.returns()[i].alias_info();
    stack->push_back(info == nullptr ? results.value(returned[i]) : aliased(schema, given, *info));
  }
  for (const auto& [tensor, alias] : launch.pairs()) {  // an `out=` that the kernel has resized
    results.bytes += double(tensor.nbytes());
    if (tensor.sizes() == alias.sizes()) continue;
    resize_on_sim(tensor, alias.sizes());
    if (sim::capturing == nullptr) Aliases().of(tensor).copy_(alias);
  }
  double elements = results.elements;
  if (elements == 0.0 && !launch.inputs().empty()) elements = double(launch.inputs().back().numel());
  double flops = flops_of(launch.name(), launch.inputs(), elements);
  if (sim::capturing == nullptr) {
    count_launch(launch.name(), device.index(), results.bytes, flops);
  } else {
    Stack made = as_they_are(Stack(stack->end() - returned.size(), stack->end()));
    auto again = [op, kept = as_they_are(given), made]() { launch_again(op, kept, made); };
    sim::capturing->nodes.push_back({again, kernel_seconds(results.bytes, flops)});
  }
  if (results.read || op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape))
    count_read(launch.name(), device.index());
}

c10::OperatorHandle operation(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
}

void convolution_boxed(const c10::OperatorHandle&, Stack* stack) {
  launch_boxed(operation("aten::convolution"), stack);
}

// Its arguments are those of `convolution_backward` without the sizes of the bias, the fourth.
void convolution_backward_boxed(const c10::OperatorHandle&, Stack* stack) {
  auto first = stack->end() - 10;
  std::vector<int64_t> channels{first->toTensor().size(1)};
  bool bias = stack->back().toBoolList()[2];
  stack->insert(first + 3, bias ? IValue(channels) : IValue());
  launch_boxed(operation("aten::convolution_backward"), stack);
}

// ---- kernels that are no launches -----------------------------------------------------------------------

Tensor empty_strided(
    at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> type,
    std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return empty_strided_on(sizes, strides, at::dtype_or_default(type), device.value_or(Device(SIM, current)));
}

Tensor empty(
    at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout> layout,
    std::optional<Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  auto strides = c10::contiguous_strides(sizes);
  if (format == at::MemoryFormat::ChannelsLast) strides = c10::get_channels_last_strides_2d(sizes);
  if (format == at::MemoryFormat::ChannelsLast3d) strides = c10::get_channels_last_strides_3d(sizes);
  return empty_strided(sizes, strides, type, layout, device, pin);
}

Tensor zero_tensor(
    at::IntArrayRef sizes, std::optional<at::ScalarType> type, std::optional<at::Layout>,
    std::optional<Device> device, std::optional<bool>) {
  at::native::ZeroTensorAllocator none(Device(SIM, index_of(device.value_or(Device(SIM, current)))));
  auto keys = c10::DispatchKeySet({c10::DispatchKey::PrivateUse1, c10::DispatchKey::ZeroTensor});
  return at::detail::empty_generic(sizes, &none, keys, at::dtype_or_default(type), std::nullopt);
}

const Tensor& resize(const Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat>) {
  resize_on_sim(self, sizes);
  return self;
}

at::Scalar local_scalar(const Tensor& self) {
  Aliases aliases;
  at::Scalar value = at::native::_local_scalar_dense_cpu(aliases.of(self));
  count_read("aten::_local_scalar_dense", self.device().index());
  return value;
}

void copy_now(const Tensor& self, const Tensor& to) {
  Aliases aliases;
  Tensor source = on_sim(self) ? aliases.of(self) : self;
  Tensor target = on_sim(to) ? aliases.of(to) : to;
  target.copy_(source);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  double bytes = double(self.nbytes());
  if (!on_sim(self)) {
    bool waits = !non_blocking || !is_pinned(self.const_data_ptr());
    count_upload("aten::copy_", to.device().index(), bytes, waits);
  } else if (!on_sim(to)) {
    count_read("aten::copy_", self.device().index());
  } else if (sim::capturing != nullptr) {
    auto again = [from = as_it_is(self), into = as_it_is(to)]() { copy_now(from, into); };
    sim::capturing->nodes.push_back({again, kernel_seconds(2.0 * bytes, 0.0)});
    return to;
  } else {
    count_launch("aten::copy_", to.device().index(), 2.0 * bytes, 0.0);
  }
  copy_now(self, to);
  return to;
}

// Operations with a kernel for the CPU that torch would otherwise take apart on another device, with other
// roundings; and `_foreach_` ones, which accelerators launch once for a whole list.
bool kept_whole(const c10::OperatorHandle& op) {
  const auto& schema = op.schema();
  for (const auto& value : schema.returns())
    if (value.alias_info() != nullptr && !value.alias_info()->isWrite()) return false;
  if (schema.name().rfind("aten::_foreach_", 0) == 0) return true;
  return op.hasKernelForDispatchKey(c10::DispatchKey::CPU) &&
      op.hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&launch_boxed>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_efficientzerotensor", &zero_tensor);
  m.impl("resize_", &resize);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("_copy_from", &copy_from);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("view_as_real", &at::native::view_as_real);
  m.impl("view_as_complex", &at::native::view_as_complex);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage_storage_offset", &at::native::set_storage_cpu_);
  m.impl("set_.source_Storage", [](Tensor& self, at::Storage source) -> Tensor& {
    return at::native::set_(self, std::move(source));
  });
  m.impl("convolution_overrideable", torch::CppFunction::makeFromBoxedFunction<&convolution_boxed>());
  m.impl(
      "convolution_backward_overrideable",
      torch::CppFunction::makeFromBoxedFunction<&convolution_backward_boxed>());
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    auto op = dispatcher.findSchema(name);
    if (name.getNamespace() != "aten" || !op.has_value()) continue;
    if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1) || !kept_whole(*op)) continue;
    auto overload = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
    m.impl(overload.c_str(), torch::CppFunction::makeFromBoxedFunction<&launch_boxed>());
  }
}

// ---- what torch asks of a device ------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return SIM; }
  Device exchangeDevice(Device device) const override {
    Device before(SIM, current);
    current = index_of(device);
    return before;
  }
  Device getDevice() const override { return Device(SIM, current); }
  void setDevice(Device device) const override { current = index_of(device); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  c10::Stream getStream(Device device) const override {
    return c10::Stream(c10::Stream::DEFAULT, Device(SIM, index_of(device)));
  }
  c10::Stream getDefaultStream(Device device) const override { return getStream(device); }
  c10::Stream getNewStream(Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  bool queryStream(const c10::Stream& stream) const override {
    Lock lock(state().mutex);
    return state().host >= state().device[stream.device_index()];
  }
  void synchronizeStream(const c10::Stream& stream) const override { synchronizeDevice(stream.device_index()); }
  void synchronizeDevice(const DeviceIndex index) const override {
    Lock lock(state().mutex);
    wait(index);
  }
  // An event is the time at which the device comes to it.
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    auto& s = state();
    Lock lock(s.mutex);
    if (*event == nullptr) *event = new double();
    double& queue = s.device[stream.device_index()];
    queue = std::max(queue, s.host);
    *static_cast<double*>(*event) = queue;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<double*>(event); }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void* event) const override {
    return event == nullptr || state().host >= *static_cast<double*>(event);
  }
  void synchronizeEvent(void* event) const override {
    auto& s = state();
    Lock lock(s.mutex);
    if (event != nullptr) s.host = std::max(s.host, *static_cast<double*>(event)) + s.costs.sync;
  }
  double elapsedTime(void* first, void* second, const DeviceIndex) const override {
    return 1e3 * (*static_cast<double*>(second) - *static_cast<double*>(first));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return DEVICES; }
  void setCurrentDevice(DeviceIndex index) const override { current = index_of(Device(SIM, index)); }
  DeviceIndex getCurrentDevice() const override { return current; }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return Guard().exchangeDevice(Device(SIM, index)).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return generators()[index < 0 ? current : index];
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Generator>(index < 0 ? current : index);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
  void resizePrivateUse1Bytes(const c10::Storage&, size_t) const override {
    TORCH_CHECK(false, "sim: storages cannot be resized");
  }
};
[[maybe_unused]] const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks()), true);

#ifdef SIM_HAS_GRAPHS
struct Graph final : at::GraphImplInterface {
  explicit Graph(const at::GraphImplArgs&) {}
  ~Graph() override {
    if (sim::capturing == &captured_) sim::capturing = nullptr;
  }
  void capture_begin(at::MempoolId_t, at::GraphCaptureMode) override {
    sim::refuse_while_capturing("another capture");
    captured_.nodes.clear();
    sim::capturing = &captured_;
  }
  void capture_end() override {
    TORCH_CHECK(sim::capturing == &captured_, "sim: this graph is not being captured");
    sim::capturing = nullptr;
  }
  void instantiate() override {}
  void replay() override {
    sim::refuse_while_capturing("a replay");
    Lock lock(state().mutex);
    double seconds = 0.0;
    for (const auto& node : captured_.nodes) {
      node.run();
      seconds += node.seconds;
    }
    count_kernel("a graph of " + std::to_string(captured_.nodes.size()) + " launches", current, seconds);
  }
  void reset() override { captured_.nodes.clear(); }
  at::MempoolId_t pool() const override { return {0, 0}; }
  void enable_debug_mode() override {}
  void debug_dump(const std::string&) override {}

 private:
  sim::Captured captured_;
};
using at::GraphImplRegistry, at::RegistererGraphImplRegistry;
C10_REGISTER_CLASS(GraphImplRegistry, SIM, Graph)
#endif

// ---- the controls ---------------------------------------------------------------------------------------

TORCH_LIBRARY(simdev, m) {
  m.def("counters(int device) -> int[]", [](int64_t device) {
    Lock lock(state().mutex);
    const auto& c = state().counters[device];
    return std::vector<int64_t>{c.launches, c.reads, c.uploads, c.allocations};
  });
  m.def("clock() -> float", []() { return state().host; });
  m.def("set_costs(float launch, float sync, float kernel, float byte, float flop) -> ()",
        [](double launch, double sync, double kernel, double byte, double flop) {
          state().costs = {launch, sync, kernel, byte, flop};
        });
  m.def("set_limit(int device, int bytes) -> ()",
        [](int64_t device, int64_t bytes) { state().limit[device] = bytes; });
  m.def("set_double(bool there) -> ()", [](bool there) { state().no_double = !there; });
  m.def("set_missing(str[] names) -> ()", [](const std::vector<std::string>& names) {
    state().missing = std::set<std::string>(names.begin(), names.end());
  });
  m.def("start_log() -> ()", []() {
    state().log.clear();
    state().logging = true;
  });
  m.def("stop_log() -> str[]", []() {
    state().logging = false;
    return state().log;
  });
  m.def("rng_state(int device) -> Tensor", [](int64_t device) { return generators()[device].get_state(); });
  m.def("set_rng_state(int device, Tensor value) -> ()",
        [](int64_t device, const Tensor& value) { generators()[device].set_state(value); });
  m.def("manual_seed(int device, int seed) -> ()",
        [](int64_t device, int64_t seed) { generators()[device].set_current_seed(uint64_t(seed)); });
}

}  // namespace
