// Tokens in mapped host memory, where the host sees them while the stream goes on.
#pragma once
#include "floats.cuh"

// As `HostTokensOperands` in host_tokens.rs.
struct HostTokensOperands {
  u64* words;  // [2][rows], from a row on; null: nobody looks
  u32* turns;  // [rows]: launches of each row, which take both places in turns
  u64 rows;
};

// By one thread, of a row: one word, which is there as a whole or not at all.  NaN of any bits is one NaN, so that no
// word is ~0, which stands where nothing was left yet.
DEV void leave_for_host(const HostTokensOperands& host, u32 row, u32 token, float greatest) {
  if (host.words == nullptr) return;
  const u32 bits = greatest != greatest ? 0x7fc00000u : __float_as_uint(greatest), turn = host.turns[row]++;
  asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(host.words + turn % 2 * host.rows + row),
               "l"(u64(bits) << 32 | token)
               : "memory");
}
