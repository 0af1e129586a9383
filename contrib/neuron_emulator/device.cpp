// The C++ side of the emulated Neuron device. It holds memory and hands calls to Python; what runs a graph is runtime.py.
//
//   privateuseone:R         memory of core R: host memory with a limit per core
//   torch.classes.neuron    SPMDModel, LayoutTransformation
//   torch.ops.neuron        _parallel_load
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/custom_class.h>
#include <torch/extension.h>

#include <array>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>

namespace py = pybind11;
using TensorList = c10::List<at::Tensor>;
using RankedTensors = c10::List<TensorList>;
using RankedDicts = c10::List<c10::Dict<std::string, at::Tensor>>;

constexpr auto DEVICE_TYPE = c10::DeviceType::PrivateUse1;
constexpr int CORES = 64;

// ---- memory of the cores

struct Execution {
  bool done = false;
  std::string error;
};

std::mutex mutex;
std::condition_variable finished;
std::array<size_t, CORES> bytes_in_use{};
std::map<const void*, std::shared_ptr<Execution>> writers;  // by storage: the execution whose output it is
int executions_in_flight = 0;
thread_local c10::DeviceIndex current_core = 0;

size_t bytes_per_core() {  // read when a process first allocates: it may be a fork of one that has imported this
  static const size_t bytes = [] {
    const char* gigabytes = std::getenv("NEURON_EMULATOR_CORE_GB");
    return size_t((gigabytes ? std::atof(gigabytes) : 16) * (1 << 30));
  }();
  return bytes;
}

void take(c10::DeviceIndex core, size_t bytes) {
  std::lock_guard<std::mutex> guard(mutex);
  if (bytes_in_use.at(core) + bytes > bytes_per_core()) {
    std::ostringstream what;
    what << "out of device memory on NeuronCore " << int(core) << " of the emulated Neuron device: " << bytes
         << " bytes wanted, " << bytes_in_use[core] << " of " << bytes_per_core() << " in use";
    throw std::runtime_error(what.str());
  }
  bytes_in_use[core] += bytes;
}

struct Block {
  void* data;
  size_t bytes;
  c10::DeviceIndex core;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  {
    std::lock_guard<std::mutex> guard(mutex);
    bytes_in_use[block->core] -= block->bytes;
    writers.erase(block->data);
  }
  std::free(block->data);
  delete block;
}

struct CoreMemory final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    const c10::Device device(DEVICE_TYPE, current_core);
    if (!bytes) return {nullptr, device};
    take(current_core, bytes);
    // aligned as XLA wants it, which then reads it where it is
    auto* block = new Block{std::aligned_alloc(64, (bytes + 63) / 64 * 64), bytes, current_core};
    return {block->data, block, &release, device};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};

CoreMemory core_memory;
REGISTER_ALLOCATOR(DEVICE_TYPE, &core_memory);

struct CoreGuard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = DEVICE_TYPE;
  c10::DeviceType type() const override { return DEVICE_TYPE; }
  c10::Device getDevice() const override { return {DEVICE_TYPE, current_core}; }
  void setDevice(c10::Device device) const override { uncheckedSetDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.has_index()) current_core = device.index();
  }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    uncheckedSetDevice(device);
    return before;
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return CORES; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, CoreGuard);

struct DeviceHooks final : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isAvailable() const override { return true; }
  c10::DeviceIndex deviceCount() const override { return CORES; }
};

// ---- executions in flight: only a copy from or to the device waits

template <typename Ready>
void wait_until(Ready ready) {
  auto wait = [&] {
    std::unique_lock<std::mutex> lock(mutex);
    finished.wait(lock, ready);
  };
  if (PyGILState_Check()) {
    py::gil_scoped_release released;
    wait();
  } else {
    wait();
  }
}

std::shared_ptr<Execution> writer_of(const at::Tensor& tensor) {
  std::lock_guard<std::mutex> guard(mutex);
  const auto entry = writers.find(tensor.storage().data());
  return entry == writers.end() ? nullptr : entry->second;
}

// An output waits for the execution that writes it, and brings its error; anything else may be a state: it waits for all.
void wait_for(const at::Tensor& tensor) {
  if (tensor.device().type() != DEVICE_TYPE) return;
  const auto writer = writer_of(tensor);
  if (!writer) return wait_until([] { return executions_in_flight == 0; });
  wait_until([&] { return writer->done; });
  if (!writer->error.empty()) throw std::runtime_error(writer->error);
}

struct ExecutionHandle {
  std::shared_ptr<Execution> execution = std::make_shared<Execution>();

  explicit ExecutionHandle(const std::vector<at::Tensor>& outputs) {
    std::lock_guard<std::mutex> guard(mutex);
    for (const auto& output : outputs) writers[output.storage().data()] = execution;
    ++executions_in_flight;
  }
  void finish(const std::string& error) {
    {
      std::lock_guard<std::mutex> guard(mutex);
      execution->done = true;
      execution->error = error;
      --executions_in_flight;
    }
    finished.notify_all();
  }
};

// ---- tensors

at::Tensor host_view(const at::Tensor& tensor) {
  if (tensor.device().is_cpu()) return tensor;
  const auto options = tensor.options().device(at::kCPU);
  return at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [tensor](void*) {}, options);
}

c10::Device chosen(std::optional<c10::Device> device) {
  return device && device->has_index() ? *device : c10::Device(DEVICE_TYPE, current_core);
}

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  const c10::DeviceGuard guard(chosen(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &core_memory, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(chosen(device));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &core_memory, keys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  const size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.itemsize(), self.storage_offset());
  auto storage = self.storage();
  if (storage.nbytes() < bytes) {
    const c10::DeviceGuard guard(self.device());
    auto grown = core_memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(grown.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(grown));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool) {
  wait_for(self);
  wait_for(to);
  host_view(to).copy_(host_view(self));
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

void on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("resize_", &resize);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&on_cpu>());
}

// ---- the runtime's classes: torchbind knows only C++, so each method calls the Python object that does the work

// A DeviceError says all in its message; of anything else the traceback is wanted.
template <typename Function>
auto in_python(Function function) -> decltype(function()) {
  py::gil_scoped_acquire gil;
  try {
    return function();
  } catch (py::error_already_set& error) {
    const auto expected = py::module_::import("neuron_emulator.errors").attr("DeviceError");
    throw std::runtime_error(error.matches(expected) ? std::string(py::str(error.value())) : error.what());
  }
}

struct SPMDModel : torch::CustomClassHolder {
  std::string neff, metaneff;
  int64_t local_ranks, world_size;
  bool mocked = false;
  PyObject* python = nullptr;

  SPMDModel(std::string neff, std::string metaneff, int64_t local_ranks, int64_t world_size)
      : neff(std::move(neff)), metaneff(std::move(metaneff)), local_ranks(local_ranks), world_size(world_size) {}
  ~SPMDModel() override {
    if (!python || !Py_IsInitialized()) return;
    py::gil_scoped_acquire gil;
    Py_DECREF(python);
  }
  py::object executable() {
    if (!python) {
      const auto make = py::module_::import("neuron_emulator.runtime").attr("Executable");
      python = make(py::bytes(neff), py::bytes(metaneff), local_ranks, world_size).release().ptr();
    }
    return py::reinterpret_borrow<py::object>(python);
  }
  bool is_initialized() {
    return mocked || in_python([&] { return executable().attr("initialized").cast<bool>(); });
  }
  void set_mock_initialized(bool value) { mocked = value; }
  void initialize(RankedDicts states, RankedDicts weights, int64_t start_rank) {
    in_python([&] {
      executable().attr("initialize")(torch::jit::toPyObject(states), torch::jit::toPyObject(weights), start_rank);
    });
  }
  TensorList forward(TensorList inputs) {
    return in_python([&] {
      const auto outputs = executable().attr(mocked ? "mock" : "forward")(torch::jit::toPyObject(inputs));
      return torch::jit::toIValue(outputs, c10::ListType::ofTensors()).toTensorList();
    });
  }
  RankedTensors ranked(const char* method, const RankedTensors& inputs) {
    return in_python([&] {
      const auto outputs = executable().attr(method)(torch::jit::toPyObject(inputs));
      const auto type = c10::ListType::create(c10::ListType::ofTensors());
      return c10::impl::toTypedList<TensorList>(torch::jit::toIValue(outputs, type).toList());
    });
  }
  RankedTensors forward_async(RankedTensors inputs) { return ranked("forward_async", inputs); }
  RankedTensors forward_ranked(RankedTensors inputs) { return ranked("forward_ranked", inputs); }
};

// neuronx-cc writes these where it wants weights in another layout; it is not here, so none is ever made with a graph in it.
struct LayoutTransformation : torch::CustomClassHolder {
  std::string neff, metaneff;
  int64_t local_ranks;
  LayoutTransformation(std::string neff, std::string metaneff, int64_t local_ranks)
      : neff(std::move(neff)), metaneff(std::move(metaneff)), local_ranks(local_ranks) {}
  RankedDicts forward(RankedDicts, bool) {
    throw std::runtime_error("LayoutTransformation: the emulated Neuron device changes no weight's layout");
  }
};

RankedDicts parallel_load(RankedDicts checkpoint) {
  RankedDicts loaded;
  for (size_t rank = 0; rank < checkpoint.size(); ++rank) {
    c10::Dict<std::string, at::Tensor> on_core;
    for (const auto& entry : checkpoint.get(rank))
      on_core.insert(entry.key(), entry.value().to(c10::Device(DEVICE_TYPE, rank)));
    loaded.push_back(on_core);
  }
  return loaded;
}

using SPMDState = std::tuple<std::string, std::string, int64_t, int64_t>;
using LayoutState = std::tuple<std::string, std::string, int64_t>;

TORCH_LIBRARY(neuron, m) {
  m.class_<SPMDModel>("SPMDModel")
      .def(torch::init<std::string, std::string, int64_t, int64_t>())
      .def("is_initialized", &SPMDModel::is_initialized)
      .def("set_mock_initialized", &SPMDModel::set_mock_initialized)
      .def("initialize", &SPMDModel::initialize)
      .def("forward", &SPMDModel::forward)
      .def("forward_async", &SPMDModel::forward_async)
      .def("forward_ranked", &SPMDModel::forward_ranked)
      .def_pickle(
          [](const c10::intrusive_ptr<SPMDModel>& model) {
            return SPMDState(model->neff, model->metaneff, model->local_ranks, model->world_size);
          },
          [](SPMDState state) {
            auto [neff, metaneff, local_ranks, world_size] = std::move(state);
            return c10::make_intrusive<SPMDModel>(std::move(neff), std::move(metaneff), local_ranks, world_size);
          });
  m.class_<LayoutTransformation>("LayoutTransformation")
      .def(torch::init<std::string, std::string, int64_t>())
      .def("forward", &LayoutTransformation::forward)
      .def_pickle(
          [](const c10::intrusive_ptr<LayoutTransformation>& model) {
            return LayoutState(model->neff, model->metaneff, model->local_ranks);
          },
          [](LayoutState state) {
            auto [neff, metaneff, local_ranks] = std::move(state);
            return c10::make_intrusive<LayoutTransformation>(std::move(neff), std::move(metaneff), local_ranks);
          });
  m.def("_parallel_load", &parallel_load);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  static DeviceHooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  py::class_<ExecutionHandle>(m, "Execution")
      .def(py::init<const std::vector<at::Tensor>&>())
      .def("finish", &ExecutionHandle::finish);
  m.def("host_view", &host_view);
  m.def("error_of", [](const at::Tensor& tensor) {
    const auto writer = writer_of(tensor);
    return writer ? writer->error : std::string();
  });
  m.def("memory_in_use", [](int core) {
    std::lock_guard<std::mutex> guard(mutex);
    return bytes_in_use.at(core);
  });
}
