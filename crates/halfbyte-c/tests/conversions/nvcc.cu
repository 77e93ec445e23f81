// The conversions as nvcc compiles them, on a GPU: every pattern of 16 bits in both halves of a word, every zero point,
// beside what the same functions give on the host (which a test of the crate compares with their definitions).
// Exit status 0: all are equal; 1: not; 77: there is no GPU.
#include <halfbyte/conversions.cuh>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "kernels.cuh"
#include "cases.inc"
#undef CASE

namespace {

int wrong = 0;

void check(cudaError_t result, const char* call) {
  if (result == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", call, cudaGetErrorString(result));
  std::exit(1);
}

template <int N, class Kernel, class Convert>
void compare(const char* name, const std::vector<unsigned>& words, Kernel kernel, Convert convert, unsigned most) {
  unsigned *in = nullptr, *out = nullptr;
  const unsigned count = unsigned(words.size());
  check(cudaMalloc(&in, count * 4), "cudaMalloc");
  check(cudaMalloc(&out, count * N * 4), "cudaMalloc");
  check(cudaMemcpy(in, words.data(), count * 4, cudaMemcpyHostToDevice), "cudaMemcpy");
  std::vector<unsigned> got(count * N);
  for (unsigned zero = 0; zero <= most; zero++) {
    kernel<<<(count + 255) / 256, 256>>>(in, out, count, zero);
    check(cudaGetLastError(), name);
    check(cudaMemcpy(got.data(), out, count * N * 4, cudaMemcpyDeviceToHost), name);
    for (unsigned i = 0; i < count; i++) {
      unsigned want[N];
      convert(words[i], zero, want);
      for (int j = 0; j < N; j++) {
        if (got[N * i + j] == want[j]) continue;
        if (wrong++ < 20)
          std::printf("%s of %#x, zero %u, register %d: %#x, on the host %#x\n", name, words[i], zero, j,
                      got[N * i + j], want[j]);
      }
    }
  }
  check(cudaFree(in), "cudaFree");
  check(cudaFree(out), "cudaFree");
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU: compiled, not run\n");
    return 77;
  }
  std::vector<unsigned> words;
  for (unsigned low = 0; low < 0x10000; low++) words.push_back(low | (low ^ 0xa5c3) << 16);
  int cases = 0;
#define CASE(name, registers, ...)                                   \
  compare<registers>(                                                \
      #name, words, name,                                            \
      [](unsigned word, unsigned zero, unsigned (&out)[registers]) { \
        using namespace halfbyte;                                    \
        (void)zero;                                                  \
        __VA_ARGS__;                                                 \
      },                                                             \
      registers == 4 ? 16 : 255);                                    \
  cases++;
#include "cases.inc"
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("%s: %d conversions, %zu words each, %d registers differ\n", properties.name, cases, words.size(), wrong);
  return wrong == 0 ? 0 : 1;
}
