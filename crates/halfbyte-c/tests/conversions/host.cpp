// What the conversions give on a host: words on standard input, registers on standard output.  Usage: host CASE ZERO.
#include <halfbyte/conversions.cuh>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

template <int N, class Convert> int each(unsigned zero, Convert convert) {
  unsigned word;
  while (std::fread(&word, sizeof word, 1, stdin) == 1) {
    unsigned out[N];
    convert(word, zero, out);
    if (std::fwrite(out, sizeof out, 1, stdout) != 1) return 1;
  }
  return 0;
}

}  // namespace

int main(int argc, char **argv) {
  using namespace halfbyte;
  if (argc != 3) return 2;
  const unsigned given = unsigned(std::strtoul(argv[2], nullptr, 10));
#define CASE(name, registers, ...)                                                        \
  if (!std::strcmp(argv[1], #name))                                                       \
    return each<registers>(given, [](unsigned word, unsigned zero, unsigned(&out)[registers]) { \
      (void)zero;                                                                         \
      __VA_ARGS__;                                                                        \
    });
#include "cases.inc"
  std::fprintf(stderr, "no case %s\n", argv[1]);
  return 2;
}
