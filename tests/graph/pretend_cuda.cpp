// Lets tensors without data be "on a GPU" where torch has none: streams, events and devices that
// do nothing. Loaded before torch, as torch asks for its hooks once; a torch that was built for CUDA
// has hooks of its own, which give way, and a guard, which `pretend` replaces after torch was loaded.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
constexpr auto CUDA = c10::DeviceType::CUDA;

struct Guard : c10::impl::NoOpDeviceGuardImpl<CUDA> {
  DeviceIndex deviceCount() const noexcept override { return 1; }
  Device getDevice() const override { return {CUDA, 0}; }
  Device exchangeDevice(Device) const override { return {CUDA, 0}; }
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, {CUDA, 0}); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, {CUDA, 0}); }
  Stream exchangeStream(Stream) const noexcept override {
    return Stream(Stream::DEFAULT, {CUDA, 0});
  }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
};

using at::CUDAHooksRegistry;
using at::RegistererCUDAHooksRegistry;
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(
    CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, Hooks)

}  // namespace

extern "C" void pretend() { const c10::impl::DeviceGuardImplRegistrar guard(CUDA, new Guard()); }
