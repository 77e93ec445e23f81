//! AMX: eight registers that hold a tile of up to 16 rows of 64 bytes, and products of two tiles. By assembly: the intrinsics
//! are not stable.
//!
//! ```text
//! sums (tmm0, tmm1 or tmm2, tmm3)    16 rows × 16 outputs, 32 bits each
//! x (tmm4 or tmm5)                   16 rows × 64 bytes along k, or fewer
//! w (tmm6, tmm7)                     16 outputs side by side, 4 bytes along k of each, as many rows as x has such fours
//! ```
//!
//! A product takes as many clocks as the larger of its operands has rows: 16, also where x is 32 bytes wide. Sums are in one of
//! two sets, so that those of one are stored while the other's are made: a store right after its products holds up all others.

use std::arch::asm;
use std::marker::PhantomData;

/// Rows of a tile of x or of sums.
pub(in crate::cpu) const ROWS: usize = 16;

/// Bytes of a row of x at most, and of each row of w and of sums.
pub(in crate::cpu) const ROW_BYTES: usize = 64;

/// Sums of 16 rows by two tiles of outputs: `[outputs / 16][16][16]`, each an int32 or the bits of an f32.
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
#[repr(C, align(64))]
pub(in crate::cpu) struct Sums(pub [[i32; 16]; 2 * ROWS]);

/// One of two sets of sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::cpu) enum Set {
    First,
    Second,
}

impl Set {
    /// The other one.
    pub fn other(self) -> Self {
        if self == Set::First { Set::Second } else { Set::First }
    }
}

/// The tiles of this thread, set up until this is dropped.
pub(in crate::cpu) struct Tiles {
    /// Bytes of a row of x.
    step: usize,
    /// Registers belong to a thread.
    thread: PhantomData<*const ()>,
}

/// What `ldtilecfg` reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// Tiles of x and w in memory, one after the other along k.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Operands {
    /// x of 16 rows.
    pub x: *const u8,
    /// w of the first 16 outputs, and of the second.
    pub w: [*const u8; 2],
    /// Tiles along k.
    pub steps: usize,
}

/// Adds the products of tiles to a set of sums by the instruction `$dot`.
macro_rules! multiply {
    ($dot:literal, $left:literal, $right:literal, $x:literal, $operands:ident, $step:expr) => {
        asm!(
            "2:",
            "tileloadd tmm6, [{w0} + {line}]",
            concat!("tileloadd ", $x, ", [{x} + {step}]"),
            concat!($dot, " ", $left, ", ", $x, ", tmm6"),
            "tileloadd tmm7, [{w1} + {line}]",
            concat!($dot, " ", $right, ", ", $x, ", tmm7"),
            "add {x}, {bytes}",
            "add {w0}, {bytes}",
            "add {w1}, {bytes}",
            "dec {steps}",
            "jnz 2b",
            x = inout(reg) $operands.x => _,
            w0 = inout(reg) $operands.w[0] => _,
            w1 = inout(reg) $operands.w[1] => _,
            steps = inout(reg) $operands.steps => _,
            step = in(reg) $step,
            line = in(reg) ROW_BYTES,
            bytes = in(reg) ROWS * $step,
            options(nostack, readonly),
        )
    };
}

/// Loads a set of sums.
macro_rules! load {
    ($left:literal, $right:literal, $at:expr) => {
        asm!(
            concat!("tileloadd ", $left, ", [{at} + {line}]"),
            concat!("tileloadd ", $right, ", [{at} + {line} + 1024]"),
            at = in(reg) $at,
            line = in(reg) ROW_BYTES,
            options(nostack, readonly),
        )
    };
}

/// Stores a set of sums.
macro_rules! store {
    ($left:literal, $right:literal, $at:expr) => {
        asm!(
            concat!("tilestored [{at} + {line}], ", $left),
            concat!("tilestored [{at} + {line} + 1024], ", $right),
            at = in(reg) $at,
            line = in(reg) ROW_BYTES,
            options(nostack),
        )
    };
}

impl Tiles {
    /// Sets this thread's tiles up for rows of x of `step` bytes, a multiple of 4 up to 64.
    ///
    /// # Safety
    /// The processor has AMX, and the system has let this process use it.
    pub unsafe fn new(step: usize) -> Self {
        assert!(step > 0 && step <= ROW_BYTES && step.is_multiple_of(4));
        let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
        row_bytes[..8].fill(ROW_BYTES as u16);
        row_bytes[4..6].fill(step as u16);
        rows[..6].fill(ROWS as u8);
        rows[6..8].fill((step / 4) as u8);
        let config = Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows };
        // SAFETY: there is AMX, and the config is one of palette 1: at most 16 rows of at most 64 bytes.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly)) };
        Self { step, thread: PhantomData }
    }

    /// Zeroes a set of sums.
    #[inline]
    pub fn zero(&self, set: Set) {
        // SAFETY: the tiles are set up (`self`).
        unsafe {
            match set {
                Set::First => asm!("tilezero tmm0", "tilezero tmm1", options(nostack, nomem)),
                Set::Second => asm!("tilezero tmm2", "tilezero tmm3", options(nostack, nomem)),
            }
        }
    }

    /// Loads a set of sums that were stored.
    #[inline]
    pub fn load(&self, set: Set, sums: &Sums) {
        let at = sums.0.as_ptr();
        // SAFETY: the tiles are set up (`self`); two tiles of 16 rows of 64 bytes are the whole of `sums`.
        unsafe {
            match set {
                Set::First => load!("tmm0", "tmm1", at),
                Set::Second => load!("tmm2", "tmm3", at),
            }
        }
    }

    /// Adds the products of int8 by int8, or of bf16 by bf16 (`float`), to a set of sums.
    ///
    /// # Safety
    /// There are as many tiles as `operands` says, of at least one step.
    #[inline]
    pub unsafe fn multiply(&self, float: bool, operands: Operands, set: Set) {
        assert!(operands.steps > 0);
        let step = self.step;
        // SAFETY: the tiles are set up, and the operands are there, as promised to this function.
        unsafe {
            match (float, set) {
                (false, Set::First) => multiply!("tdpbssd", "tmm0", "tmm1", "tmm4", operands, step),
                (false, Set::Second) => multiply!("tdpbssd", "tmm2", "tmm3", "tmm5", operands, step),
                (true, Set::First) => multiply!("tdpbf16ps", "tmm0", "tmm1", "tmm4", operands, step),
                (true, Set::Second) => multiply!("tdpbf16ps", "tmm2", "tmm3", "tmm5", operands, step),
            }
        }
    }

    /// Adds the products of unsigned bytes, two tiles of rows, by signed ones, two of outputs, to both sets of sums.
    ///
    /// # Safety
    /// There are `steps` tiles at each pointer, at least one.
    #[inline]
    pub unsafe fn multiply_unsigned(&self, x: [*const u8; 2], w: [*const i8; 2], steps: usize) {
        assert!(steps > 0);
        // SAFETY: the tiles are set up (`self`), and the operands are there, as promised to this function.
        unsafe {
            asm!(
                "2:",
                "tileloadd tmm6, [{w0} + {line}]",
                "tileloadd tmm4, [{x0} + {step}]",
                "tdpbusd tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{w1} + {line}]",
                "tdpbusd tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{x1} + {step}]",
                "tdpbusd tmm2, tmm5, tmm6",
                "tdpbusd tmm3, tmm5, tmm7",
                "add {x0}, {bytes}",
                "add {x1}, {bytes}",
                "add {w0}, {bytes}",
                "add {w1}, {bytes}",
                "dec {steps}",
                "jnz 2b",
                x0 = inout(reg) x[0] => _,
                x1 = inout(reg) x[1] => _,
                w0 = inout(reg) w[0] => _,
                w1 = inout(reg) w[1] => _,
                steps = inout(reg) steps => _,
                step = in(reg) self.step,
                line = in(reg) ROW_BYTES,
                bytes = in(reg) ROWS * self.step,
                options(nostack, readonly),
            )
        }
    }

    /// Stores both sets of sums, `[rows][outputs]`: those of the first 16 rows and those of the next.
    #[inline]
    pub fn store_all(&self, sums: &mut [[i32; 2 * ROWS]; 2 * ROWS]) {
        // SAFETY: the tiles are set up (`self`); 32 rows of two tiles side by side are the whole of `sums`.
        unsafe {
            asm!(
                "tilestored [{first} + {line}], tmm0",
                "tilestored [{first} + {line} + 64], tmm1",
                "tilestored [{second} + {line}], tmm2",
                "tilestored [{second} + {line} + 64], tmm3",
                first = in(reg) sums.as_mut_ptr(),
                second = in(reg) sums.as_mut_ptr().add(ROWS),
                line = in(reg) size_of::<[i32; 2 * ROWS]>(),
                options(nostack),
            )
        }
    }

    /// Multiplies what lies in the tiles, four times a round: as fast as products can be. Returns multiplications and additions.
    pub fn repeat(&self, float: bool, rounds: u64) -> u64 {
        macro_rules! rounds {
            ($dot:literal) => {
                asm!(
                    "2:",
                    concat!($dot, " tmm0, tmm4, tmm6"),
                    concat!($dot, " tmm1, tmm4, tmm7"),
                    concat!($dot, " tmm2, tmm5, tmm6"),
                    concat!($dot, " tmm3, tmm5, tmm7"),
                    "dec {rounds}",
                    "jnz 2b",
                    rounds = inout(reg) rounds.max(1) => _,
                    options(nostack, nomem),
                )
            };
        }
        // SAFETY: the tiles are set up (`self`), and so hold numbers.
        unsafe { if float { rounds!("tdpbf16ps") } else { rounds!("tdpbssd") } };
        let products = 4 * ROWS * ROWS * if float { self.step / 2 } else { self.step };
        rounds.max(1) * 2 * products as u64
    }

    /// Stores a set of sums.
    #[inline]
    pub fn store(&self, set: Set, sums: &mut Sums) {
        let at = sums.0.as_mut_ptr();
        // SAFETY: the tiles are set up (`self`); two tiles of 16 rows of 64 bytes are the whole of `sums`.
        unsafe {
            match set {
                Set::First => store!("tmm0", "tmm1", at),
                Set::Second => store!("tmm2", "tmm3", at),
            }
        }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: the tiles are set up.
        unsafe { asm!("tilerelease", options(nostack, nomem)) };
    }
}

/// Whether the processor has AMX for int8 and bf16, and the system lets this process use it: asked for once.
#[cfg(target_os = "linux")]
pub(in crate::cpu) fn is_there() -> bool {
    use std::arch::x86_64::{__cpuid, __cpuid_count};
    /// The bits of leaf 7 for bf16, tiles and int8.
    const AMX: u32 = 1 << 22 | 1 << 24 | 1 << 25;
    /// `ARCH_REQ_XCOMP_PERM`, and the number of the tiles' state.
    const REQUEST: [libc::c_long; 2] = [0x1023, 18];
    static FOUND: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *FOUND.get_or_init(|| {
        let has = __cpuid(0).eax >= 7 && __cpuid_count(7, 0).edx & AMX == AMX;
        // SAFETY: asks for the right to use tiles; nothing else changes.
        has && unsafe { libc::syscall(libc::SYS_arch_prctl, REQUEST[0], REQUEST[1]) } == 0
    })
}

/// Other systems were not tried.
#[cfg(not(target_os = "linux"))]
pub(in crate::cpu) fn is_there() -> bool {
    false
}
