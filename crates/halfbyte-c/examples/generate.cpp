// A language model in C++: what is in its checkpoint, one layer of it, and text as it comes.
//
//   c++ -std=c++17 generate.cpp $(pkg-config --cflags --libs halfbyte) && ./a.out MODEL "def main():" 32
#include <halfbyte.h>

#include <array>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// Handles that free themselves, and statuses as exceptions.
template <class T, void (*FREE)(T *)> struct Free {
  void operator()(T *handle) const { FREE(handle); }
};
using Device = std::unique_ptr<halfbyte_device, Free<halfbyte_device, halfbyte_device_free>>;
using Checkpoint = std::unique_ptr<halfbyte_checkpoint, Free<halfbyte_checkpoint, halfbyte_checkpoint_free>>;
using Linear = std::unique_ptr<halfbyte_linear, Free<halfbyte_linear, halfbyte_linear_free>>;
using Model = std::unique_ptr<halfbyte_model, Free<halfbyte_model, halfbyte_model_free>>;

void check(halfbyte_status status) {
  if (status != HALFBYTE_STATUS_OK) throw std::runtime_error(halfbyte_last_error());
}

// The handle that a function makes.
template <class Handle, class Make> Handle made(Make make) {
  typename Handle::pointer handle = nullptr;
  check(make(&handle));
  return Handle(handle);
}

DLTensor matrix(std::vector<float> &values, std::array<int64_t, 2> &shape) {
  DLTensor tensor = {};
  tensor.data = values.data();
  tensor.device.device_type = kDLCPU;
  tensor.ndim = 2;
  tensor.dtype.code = kDLFloat;
  tensor.dtype.bits = 32;
  tensor.dtype.lanes = 1;
  tensor.shape = shape.data();
  return tensor;
}

void run(const std::string &path, const std::string &prompt, std::size_t tokens) {
  const auto device = made<Device>([](auto out) { return halfbyte_device_cpu(0, out); });
  const auto checkpoint = made<Checkpoint>([&](auto out) { return halfbyte_checkpoint_open(path.c_str(), out); });
  const std::size_t layers = halfbyte_checkpoint_layers(checkpoint.get());
  std::cout << layers << " layers\n";

  // The last one, whatever it is: packed from the file, times one row of ones.
  const char *name = halfbyte_checkpoint_layer(checkpoint.get(), layers - 1);
  const auto linear = made<Linear>([&](auto out) {
    return halfbyte_linear_load(device.get(), checkpoint.get(), name, HALFBYTE_ACT_A16, HALFBYTE_ACTIVATION_NONE, out);
  });
  std::array<int64_t, 2> x_shape = {1, int64_t(halfbyte_linear_k(linear.get()))};
  std::array<int64_t, 2> y_shape = {1, int64_t(halfbyte_linear_n(linear.get()))};
  std::vector<float> x(halfbyte_linear_k(linear.get()), 1.0f), y(halfbyte_linear_n(linear.get()));
  const DLTensor x_tensor = matrix(x, x_shape), y_tensor = matrix(y, y_shape);
  check(halfbyte_linear_forward(linear.get(), device.get(), &x_tensor, &y_tensor));
  std::cout << name << ": " << y.size() << " x " << x.size() << ", y[0] = " << y[0] << "\n";

  // Quantised while it is loaded.
  const auto model = made<Model>([&](auto out) {
    return halfbyte_model_load(device.get(), path.c_str(), "w4a8-g128", HALFBYTE_ACT_A16, out);
  });
  halfbyte_generation_options options;
  check(halfbyte_generation_options_default(sizeof options, &options));
  options.max_tokens = tokens;
  halfbyte_generation result = {};
  const auto show = [](void *, int64_t, const char *text, std::size_t length) -> int32_t {
    std::cout.write(text, std::streamsize(length)).flush();
    return 0;
  };
  std::cout << prompt;
  check(halfbyte_model_generate(model.get(), prompt.c_str(), &options, show, nullptr, &result));
  std::cout << "\n" << result.prompt_tokens << " + " << result.new_tokens << " tokens\n";
}

}  // namespace

int main(int argc, char **argv) {
  if (argc != 4) {
    std::cerr << "usage: " << argv[0] << " MODEL PROMPT TOKENS\n";
    return 2;
  }
  try {
    run(argv[1], argv[2], std::strtoul(argv[3], nullptr, 10));
  } catch (const std::exception &error) {
    std::cerr << "error: " << error.what() << "\n";
    return 1;
  }
  return 0;
}
