//! The instruction sets that kernels are written for, found once at run time.

use crate::error::{Error, Result};
use crate::kernel::Reason;
use std::ffi::OsStr;

/// Families of instruction sets, each with kernels of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Isa {
    /// Plain Rust, whatever the processor.
    Plain,
    /// AVX2 with FMA and F16C.
    Avx2,
    /// The same, with AVX-VNNI: int8 dot products of Intel's processors without AVX-512.
    AvxVnni,
    /// AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// The same, with AMX tiles of int8 and bf16 that the system lets this process use. (Linux.)
    Amx,
}

impl Isa {
    /// All of them, each with what those before it have, but AVX-512, which may come without AVX-VNNI.
    pub const ALL: [Self; 5] = [Isa::Plain, Isa::Avx2, Isa::AvxVnni, Isa::Avx512, Isa::Amx];

    /// Name as `HALFBYTE_ISA` and `doctor` write it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Plain => "plain",
            Isa::Avx2 => "avx2",
            Isa::AvxVnni => "avxvnni",
            Isa::Avx512 => "avx512",
            Isa::Amx => "amx",
        }
    }
}

/// What a processor offers to kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Caps {
    /// The richest family of instruction sets.
    pub isa: Isa,
    /// Whether there are bf16 dot products (AVX512_BF16) that are faster than f32 multiply-adds. Intel's take two clocks: 121 Gflop/s
    /// a core of a Xeon with AMX, where multiply-adds reach 245; a Zen 4 gives 236 where those reach 118.
    pub bf16_dot: bool,
}

impl Caps {
    /// What this processor offers.
    pub fn detect() -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 =
                is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
            let avx512 = avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni");
            if avx512 {
                let isa = if super::x86::amx::is_there() { Isa::Amx } else { Isa::Avx512 };
                return Self { isa, bf16_dot: is_x86_feature_detected!("avx512bf16") && !is_intel() };
            }
            if avx2 {
                let isa = if has_avx_vnni() { Isa::AvxVnni } else { Isa::Avx2 };
                return Self { isa, bf16_dot: false };
            }
        }
        Self { isa: Isa::Plain, bf16_dot: false }
    }

    /// This processor, but no more than what `HALFBYTE_ISA` (`plain`, `avx2`, `avxvnni`, `avx512`, `amx`) allows, if it is set and not empty.
    /// Errors: another name, or what this processor does not reach.
    pub fn detect_within_environment() -> Result<Self> {
        Self::detect().limited_by(&std::env::var_os("HALFBYTE_ISA").unwrap_or_default())
    }

    /// The same processor, but no more than what the variable says, if it says anything.
    fn limited_by(self, name: &OsStr) -> Result<Self> {
        if name.is_empty() {
            return Ok(self);
        }
        let isa = Isa::ALL.into_iter().find(|isa| name == isa.name()).ok_or_else(|| {
            Error::invalid("HALFBYTE_ISA", "plain, avx2, avxvnni, avx512 or amx", format!("{name:?}"))
        })?;
        self.limited_to(isa).map_err(|error| match error {
            Error::Device { cause, .. } => Error::Device { op: "HALFBYTE_ISA", cause },
            other => other,
        })
    }

    /// The same processor with nothing richer than `isa`. Error: the processor does not reach it.
    pub fn limited_to(self, isa: Isa) -> Result<Self> {
        if isa > self.isa {
            return Err(Error::Device {
                op: "cpu",
                cause: format!("expected a processor with {}, got one with {} at most", isa.name(), self.isa.name()),
            });
        }
        if isa == Isa::AvxVnni && !has_avx_vnni() {
            return Err(Error::Device {
                op: "cpu",
                cause: format!("expected a processor with {}, got one with {} without it", isa.name(), self.isa.name()),
            });
        }
        Ok(Self { isa, bf16_dot: self.bf16_dot && isa >= Isa::Avx512 })
    }
}

/// Whether a device runs kernels for a family; else why not. Those for AVX-VNNI run where nothing richer is used.
pub(super) fn needs(caps: &Caps, isa: Isa) -> std::result::Result<(), Reason> {
    let uses = caps.isa.name();
    match caps.isa >= isa {
        true if isa == Isa::AvxVnni && caps.isa > isa => {
            Err(Reason(format!("serves where there is no AVX-512, this device uses {uses}")))
        }
        true => Ok(()),
        false => Err(Reason(format!("needs {}, this device uses {uses}", isa.name()))),
    }
}

/// Whether there are int8 dot products of 256 bits that are no part of AVX-512.
fn has_avx_vnni() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("avxvnni");
    #[cfg(not(target_arch = "x86_64"))]
    false
}

/// Bytes ahead that a stream of codes is prefetched, where it is.
#[cfg(target_arch = "x86_64")]
pub(super) const AHEAD: usize = 4096;

/// Bytes ahead that a stream should be prefetched of which the processor does little with each byte: on Intel's processors, where that makes
/// one row up to twice as fast; 0 where the processor brings it faster by itself, as a Zen 4 does (`docs/decisions/0032-one-row-on-cpus.md`).
pub(super) fn stream_ahead() -> usize {
    #[cfg(target_arch = "x86_64")]
    if is_intel() {
        return AHEAD;
    }
    0
}

/// Whether Intel made this processor. It is asked once: the instruction takes 10 µs in a virtual machine.
#[cfg(target_arch = "x86_64")]
fn is_intel() -> bool {
    static IS_INTEL: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    *IS_INTEL.get_or_init(|| {
        let leaf = std::arch::x86_64::__cpuid(0);
        [leaf.ebx, leaf.edx, leaf.ecx].map(u32::to_le_bytes).as_flattened() == b"GenuineIntel"
    })
}

/// Compiles one plain body for each family of instruction sets and picks the compiled one at run time.
///
/// `per_isa! { pub fn name(a: A) -> R { body } }` makes `fn name(isa: Isa, a: A) -> R`. The compiler vectorises the
/// body for each. `isa` must be one that the processor has, as [`Caps::isa`] is.
macro_rules! per_isa {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? $body:block) => {
        $(#[$meta])*
        $vis fn $name(isa: $crate::cpu::isa::Isa, $($arg: $ty),*) $(-> $ret)? {
            #[inline(always)]
            fn plain($($arg: $ty),*) $(-> $ret)? $body
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    plain($($arg),*)
                }
                #[target_feature(enable = "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    plain($($arg),*)
                }
                match isa {
                    // SAFETY: a `Caps` with this family is made only where the processor was found to have it.
                    $crate::cpu::isa::Isa::Avx512 | $crate::cpu::isa::Isa::Amx => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::isa::Isa::Avx2 | $crate::cpu::isa::Isa::AvxVnni => return unsafe { avx2($($arg),*) },
                    $crate::cpu::isa::Isa::Plain => {}
                }
            }
            let _ = isa;
            plain($($arg),*)
        }
    };
}
pub(crate) use per_isa;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_limits_or_is_refused() {
        let caps = Caps::detect();
        assert_eq!(caps.limited_by(OsStr::new("")).unwrap(), caps);
        assert_eq!(caps.limited_by(OsStr::new("plain")).unwrap().isa, Isa::Plain);
        let refused = |name: &OsStr| caps.limited_by(name).unwrap_err().to_string();
        assert!(refused(OsStr::new("avx")).ends_with("got \"avx\""), "{}", refused(OsStr::new("avx")));
        let plain = Caps { isa: Isa::Plain, bf16_dot: false };
        let beyond = plain.limited_by(OsStr::new("avx2")).unwrap_err().to_string();
        assert_eq!(beyond, "HALFBYTE_ISA: expected a processor with avx2, got one with plain at most");
        #[cfg(unix)]
        {
            let name = std::os::unix::ffi::OsStrExt::from_bytes(b"plain\xff".as_slice());
            assert!(refused(name).ends_with("got \"plain\\xFF\""), "{}", refused(name));
        }
    }
}
