// A second kind of device whose memory and arithmetic are the CPU's: two devices, second:0 and
// second:1. Built and loaded by second_device.py, which says what it is for.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <mutex>

namespace {

using at::Tensor;
using c10::Device, c10::DeviceIndex, c10::DispatchKey, c10::DispatchKeySet, c10::IValue;

constexpr auto KIND = c10::DeviceType::PrivateUse1;
constexpr DeviceIndex COUNT = 2;
thread_local DeviceIndex current = 0;  // as under CUDA: of a thread, and 0 in a new one

DeviceIndex known(DeviceIndex index) {
  TORCH_CHECK_VALUE(0 <= index && index < COUNT, "invalid device ordinal ", int(index));
  return index;
}

Device at_index(std::optional<Device> device) {
  return {KIND, device && device->has_index() ? known(device->index()) : current};
}

// Streams and events ------------------------------------------------------------------------------
// Everything runs at once, so that nothing can go wrong; what would go wrong on a machine where
// streams run side by side is found by clocks. A stream knows how far it has waited for each.

using Clock = std::vector<int64_t>;  // by stream: its work up to this count is done
std::mutex lock;
std::vector<Clock> clocks(COUNT);  // by stream; the first ones are the devices' default streams
Clock host;  // what the CPU has waited for: whatever starts later comes after it
thread_local c10::StreamId streams[COUNT] = {0, 1};

void learn(Clock& clock, const Clock& other) {
  clock.resize(std::max(clock.size(), other.size()));
  for (size_t i = 0; i < other.size(); i++) clock[i] = std::max(clock[i], other[i]);
}

struct Stamp {  // of a piece of memory: the last work that wrote it
  c10::StreamId stream;
  int64_t count;
};
std::unordered_map<const void*, Stamp> written;

struct Event {
  Clock clock;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return KIND; }
  Device getDevice() const override { return {KIND, current}; }
  void setDevice(Device device) const override { current = known(device.index()); }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  Device exchangeDevice(Device device) const override {
    Device old = getDevice();
    if (device.has_index()) setDevice(device);
    return old;
  }
  DeviceIndex deviceCount() const noexcept override { return COUNT; }

  c10::Stream getStream(Device device) const override {
    device = at_index(device);
    return c10::Stream(c10::Stream::UNSAFE, device, streams[device.index()]);
  }
  c10::Stream getDefaultStream(Device device) const override {
    device = at_index(device);
    return c10::Stream(c10::Stream::UNSAFE, device, device.index());
  }
  c10::Stream getNewStream(Device device, int) const override {
    std::lock_guard<std::mutex> hold(lock);
    clocks.emplace_back();
    return c10::Stream(c10::Stream::UNSAFE, at_index(device), c10::StreamId(clocks.size() - 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    c10::Stream old = getStream(stream.device());
    streams[stream.device_index()] = stream.id();
    return old;
  }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> hold(lock);
    learn(host, clocks[stream.id()]);
  }
  void synchronizeDevice(const DeviceIndex) const override {
    std::lock_guard<std::mutex> hold(lock);
    for (auto& clock : clocks) learn(host, clock);
  }
  void record(void** event, const c10::Stream& stream, const DeviceIndex,
              const c10::EventFlag) const override {
    std::lock_guard<std::mutex> hold(lock);
    if (!*event) *event = new Event;
    static_cast<Event*>(*event)->clock = clocks[stream.id()];
  }
  void block(void* event, const c10::Stream& stream) const override {
    std::lock_guard<std::mutex> hold(lock);
    if (event) learn(clocks[stream.id()], static_cast<Event*>(event)->clock);
  }
  bool queryEvent(void*) const override { return true; }
  void synchronizeEvent(void* event) const override {
    std::lock_guard<std::mutex> hold(lock);
    if (event) learn(host, static_cast<Event*>(event)->clock);
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// One operation on the current stream of a device: it reads some memory and writes some.
void work(Device device, const std::vector<Tensor>& read, const std::vector<Tensor>& write) {
  std::lock_guard<std::mutex> hold(lock);
  const auto stream = streams[device.index()];
  auto& clock = clocks[stream];
  learn(clock, host);
  clock.resize(std::max(clock.size(), size_t(stream + 1)));
  for (const auto* tensors : {&read, &write})
    for (const auto& tensor : *tensors) {
      auto found = written.find(tensor.storage().unsafeGetStorageImpl());
      if (found == written.end() || found->second.stream == stream) continue;
      auto [other, count] = found->second;
      TORCH_CHECK(size_t(other) < clock.size() && clock[other] >= count, "stream ", stream,
                  " uses memory that stream ", other, " has written, and has not waited for it");
    }
  clock[stream]++;
  for (const auto& tensor : write)
    written[tensor.storage().unsafeGetStorageImpl()] = {stream, clock[stream]};
}

// New memory: what was written at its address before is of no account.
Tensor fresh(Tensor tensor) {
  std::lock_guard<std::mutex> hold(lock);
  written.erase(tensor.storage().unsafeGetStorageImpl());
  return tensor;
}

void wait(Device device) {  // the CPU reads what the device's current stream has made
  std::lock_guard<std::mutex> hold(lock);
  learn(host, clocks[streams[device.index()]]);
}

// Random numbers ----------------------------------------------------------------------------------

struct Random final : c10::GeneratorImpl {
  at::Generator cpu = at::make_generator<at::CPUGeneratorImpl>();
  explicit Random(DeviceIndex index)
      : GeneratorImpl(Device(KIND, index), DispatchKeySet(DispatchKey::PrivateUse1)) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "no offset"); }
  uint64_t get_offset() const override { TORCH_CHECK(false, "no offset"); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return cpu.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    cpu.set_state(at::Tensor(state.shallow_copy_and_detach(0, true)));
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return cpu.get_state().getIntrusivePtr();
  }
  Random* clone_impl() const override {
    auto* found = new Random(device().index());
    found->cpu = cpu.clone();
    return found;
  }
};

const at::Generator& default_generator(DeviceIndex index) {
  static at::Generator found[COUNT] = {at::make_generator<Random>(0), at::make_generator<Random>(1)};
  return found[index < 0 ? current : known(index)];
}

// Memory ------------------------------------------------------------------------------------------

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto data = c10::GetCPUAllocator()->allocate(size);
    auto* start = data.get();
    auto free = data.get_deleter();
    return {start, data.release_context(), free, Device(KIND, current)};
  }
  void copy_data(void* to, const void* from, size_t size) const override {
    default_copy_data(to, from, size);
  }
} memory;
REGISTER_ALLOCATOR(KIND, &memory);

// A tensor of another kind over a storage, with the shape of a tensor.
Tensor over(c10::Storage storage, DispatchKey key, const Tensor& like) {
  auto found = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), DispatchKeySet(key), like.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(
      like.sizes(), like.strides(), like.storage_offset());
  found._set_conj(like.is_conj());  // a view that is read as conjugate, or as negative
  found._set_neg(like.is_neg());
  return found;
}

// The same memory as a CPU tensor.
Tensor on_cpu(const Tensor& tensor) {
  const auto& storage = tensor.storage();
  c10::DataPtr data(storage.mutable_data(), Device(c10::kCPU));
  return over({c10::Storage::use_byte_size_t{}, storage.nbytes(), std::move(data),
               c10::GetCPUAllocator(), true}, DispatchKey::CPU, tensor);
}

// The memory of a CPU tensor, kept for as long as it is used.
c10::Storage kept(const Tensor& cpu, Device device) {
  auto* storage = new c10::Storage(cpu.storage());
  c10::DataPtr data(storage->mutable_data(), storage,
                    [](void* p) { delete static_cast<c10::Storage*>(p); }, device);
  return {c10::Storage::use_byte_size_t{}, storage->nbytes(), std::move(data), &memory, true};
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return COUNT; }
  DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(DeviceIndex index) const override { current = known(index); }
  DeviceIndex exchangeDevice(DeviceIndex index) const override {
    return std::exchange(current, known(index));
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex index) const override {
    return index < 0 ? current : exchangeDevice(index);
  }
  const at::Generator& getDefaultGenerator(DeviceIndex index) const override {
    return default_generator(index);
  }
  at::Generator getNewGenerator(DeviceIndex index) const override {
    return at::make_generator<Random>(index < 0 ? current : known(index));
  }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return c10::GetCPUAllocator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t size) const override {
    auto data = memory.allocate(size);
    std::memcpy(data.get(), storage.data(), std::min(size, storage.nbytes()));
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(size);
  }
};
const bool registered = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// Operations --------------------------------------------------------------------------------------

Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
             std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>,
             std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(at_index(device));
  return fresh(at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, DispatchKeySet(DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype), format));
}

Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(at_index(device));
  return fresh(at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &memory,
      DispatchKeySet(DispatchKey::PrivateUse1), c10::dtype_or_default(dtype)));
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  Tensor source = from, target = to;
  if (from.device().type() == KIND) {
    source = on_cpu(from);
    work(from.device(), {from}, {});
  }
  if (to.device().type() == KIND) {
    target = on_cpu(to);
    if (from.device().type() == KIND && from.device() != to.device()) wait(from.device());
    work(to.device(), {}, {to});
  } else {
    wait(from.device());
  }
  target.copy_(source);
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

at::Scalar local_scalar(const Tensor& tensor) {
  work(tensor.device(), {tensor}, {});
  wait(tensor.device());
  return on_cpu(tensor).item();
}

void record_stream(Tensor&, c10::Stream) {}

// Every other operation: the CPU's, on the same memory; operands must lie on one device.
void fallback(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  const std::string& name = op.schema().name();
  std::optional<Device> device;
  for (auto i = begin; i < stack->size(); i++) {
    const auto& value = (*stack)[i];
    auto look = [&](const Tensor& tensor) {
      if (!tensor.defined() || tensor.device().type() != KIND) return;
      TORCH_CHECK(!device || *device == tensor.device(),
                  "Expected all tensors to be on the same device, but found at least two devices, ",
                  *device, " and ", tensor.device(), "! (", name, ")");
      device = tensor.device();
    };
    if (value.isTensor()) look(value.toTensor());
    else if (value.isTensorList()) for (const Tensor& t : value.toTensorVector()) look(t);
    else if (value.isList()) for (const IValue& v : value.toListRef()) if (v.isTensor()) look(v.toTensor());
  }
  if (!device)
    for (auto i = begin; i < stack->size(); i++)
      if ((*stack)[i].isDevice()) device = at_index((*stack)[i].toDevice());
  TORCH_CHECK(device, name, " on ", KIND, " without a tensor or a device of it");
  c10::OptionalDeviceGuard guard(*device);

  std::vector<std::pair<Tensor, Tensor>> pairs;  // (of the device, its twin on the CPU)
  std::vector<Tensor> read, write;
  for (size_t k = 0; k < arguments.size(); k++) {
    auto& value = (*stack)[begin + k];
    const auto* alias = arguments[k].alias_info();
    const bool writes = alias && alias->isWrite();
    // CUDA takes indices from the CPU, and numbers as tensors of no dimension
    const bool indices = arguments[k].name() == "indices" && name.find("index") != name.npos;
    auto twin = [&](const Tensor& tensor) -> Tensor {
      if (!tensor.defined()) return tensor;
      if (tensor.device().type() != KIND) {
        TORCH_CHECK(!writes && (indices || tensor.dim() == 0),
                    "Expected all tensors to be on the same device, but found at least two devices, ",
                    *device, " and ", tensor.device(), "! (", name, ": ", arguments[k].name(), ")");
        return tensor;
      }
      pairs.emplace_back(tensor, on_cpu(tensor));
      (writes ? write : read).push_back(tensor);
      return pairs.back().second;
    };
    if (value.isTensor()) {
      value = twin(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(twin(tensor));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector())
        list.push_back(tensor ? std::optional<Tensor>(twin(*tensor)) : std::nullopt);
      value = list;
    } else if (value.isDevice()) {
      value = Device(c10::kCPU);
    } else if (arguments[k].name() == "generator") {
      auto given = value.isNone() ? default_generator(device->index()) : value.toGenerator();
      TORCH_CHECK(given.device().type() == KIND, "Expected a '", KIND,
                  "' device type for generator but found '", given.device().type(), "'");
      value = static_cast<Random*>(given.unsafeGetGeneratorImpl())->cpu;
    }
  }
  work(*device, read, write);
  op.callBoxed(stack);

  auto back = [&](const Tensor& cpu) -> Tensor {
    if (!cpu.defined()) return cpu;
    for (const auto& [ours, twin] : pairs) {
      if (cpu.is_same(twin)) return ours;
      if (cpu.storage().unsafeGetStorageImpl() == twin.storage().unsafeGetStorageImpl())
        return over(ours.storage(), DispatchKey::PrivateUse1, cpu);
    }
    auto found = fresh(over(kept(cpu, *device), DispatchKey::PrivateUse1, cpu));
    work(*device, {}, {found});
    return found;
  };
  for (auto& [ours, twin] : pairs) {  // an operation may have resized what it writes
    if (twin.storage().data() != ours.storage().data()) {
      auto storage = kept(twin, *device);
      ours.storage().set_data_ptr_noswap(std::move(storage.mutable_data_ptr()));
      ours.storage().unsafeGetStorageImpl()->set_nbytes(storage.nbytes());
    }
    if (ours.sizes() != twin.sizes() || ours.strides() != twin.strides())
      ours.unsafeGetTensorImpl()->set_sizes_and_strides(
          twin.sizes(), twin.strides(), twin.storage_offset());
  }
  const auto results = op.schema().returns().size();
  for (auto i = stack->size() - results; i < stack->size(); i++) {
    auto& value = (*stack)[i];
    if (value.isTensor()) {
      value = back(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(back(tensor));
      value = list;
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", local_scalar);
  m.impl("record_stream", record_stream);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage", [](Tensor& self, c10::Storage storage) -> Tensor& {
    int64_t size = storage.nbytes() / self.itemsize();
    return at::native::set_storage_cpu_(self, std::move(storage), 0, size, 1);
  });
  m.impl("set_.source_Storage_storage_offset",
         [](Tensor& self, c10::Storage storage, int64_t offset, at::IntArrayRef size,
            at::IntArrayRef stride) -> Tensor& {
           return at::native::set_storage_cpu_(self, std::move(storage), offset, size, stride);
         });
  // of these torch would ask for kernels of ours, or make do with slower ones that bear less
  for (auto name : {"convolution", "convolution_backward", "native_group_norm", "native_layer_norm"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Of a conjugate or negative view torch copies the values first, by this very operation.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}
TORCH_LIBRARY_IMPL(aten, Negative, m) {
  m.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY(second, m) {  // for second_device.py
  m.def("get_rng_state(int index) -> Tensor",
        [](int64_t index) { return default_generator(index).get_state(); });
  m.def("set_rng_state(Tensor state, int index) -> ()", [](const Tensor& state, int64_t index) {
    at::Generator(default_generator(index)).set_state(state);
  });
  m.def("manual_seed(int seed, int index) -> ()", [](int64_t seed, int64_t index) {
    at::Generator(default_generator(index)).set_current_seed(seed);
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}
