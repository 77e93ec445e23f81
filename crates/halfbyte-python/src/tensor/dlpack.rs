//! The structs of DLPack 1.3 as its header lays them out: what tensor libraries hand each other.

use std::ffi::{c_char, c_int, c_void};

/// Memory of the host.
pub const CPU: i32 = 1;
/// Memory of an NVIDIA GPU.
pub const CUDA: i32 = 2;
/// Memory of the host that a GPU reads.
pub const CUDA_HOST: i32 = 3;

/// Nobody may write the tensor.
pub const READ_ONLY: u64 = 1;

/// The version whose structs these are.
pub const VERSION: Version = Version { major: 1, minor: 3 };

/// A version of DLPack; another major one has other structs.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

/// A kind of memory and its number.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    pub kind: i32,
    pub index: i32,
}

/// A type of elements: a kind of numbers, bits, and how many of them are one element.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DataType {
    pub code: u8,
    pub bits: u8,
    pub lanes: u16,
}

impl DataType {
    /// IEEE half precision.
    pub const F16: Self = Self::new(2, 16);
    /// IEEE single precision.
    pub const F32: Self = Self::new(2, 32);
    /// IEEE double precision.
    pub const F64: Self = Self::new(2, 64);
    /// Brain float.
    pub const BF16: Self = Self::new(4, 16);
    /// Signed bytes.
    pub const I8: Self = Self::new(0, 8);
    /// Unsigned bytes.
    pub const U8: Self = Self::new(1, 8);
    /// Signed words of 32 bits.
    pub const I32: Self = Self::new(0, 32);
    /// Signed words of 64 bits.
    pub const I64: Self = Self::new(0, 64);
    /// Booleans, a byte each.
    pub const BOOL: Self = Self::new(6, 8);

    /// One number an element.
    pub const fn new(code: u8, bits: u8) -> Self {
        Self { code, bits, lanes: 1 }
    }

    /// Bytes an element takes.
    pub fn bytes(self) -> usize {
        (usize::from(self.bits) * usize::from(self.lanes)).div_ceil(8)
    }
}

/// The name as numpy and torch write it.
impl std::fmt::Display for DataType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.code {
            0 => "int",
            1 => "uint",
            2 => "float",
            4 => "bfloat",
            5 => "complex",
            6 => return f.write_str("bool"),
            _ => return write!(f, "type {} of {} bits", self.code, self.bits),
        };
        write!(f, "{kind}{}", self.bits)?;
        if self.lanes == 1 { Ok(()) } else { write!(f, "x{}", self.lanes) }
    }
}

/// A tensor that somebody else owns.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct DlTensor {
    pub data: *mut c_void,
    pub device: Device,
    pub ndim: i32,
    pub dtype: DataType,
    pub shape: *mut i64,
    /// In elements; null: rows lie behind each other.
    pub strides: *mut i64,
    pub byte_offset: u64,
}

/// A tensor with the function that lets go of it, as before version 1.
#[repr(C)]
#[derive(Debug)]
pub struct Managed {
    pub tensor: DlTensor,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut Managed)>,
}

/// The same from version 1 on.
#[repr(C)]
#[derive(Debug)]
pub struct ManagedVersioned {
    pub version: Version,
    pub manager_ctx: *mut c_void,
    pub deleter: Option<unsafe extern "C" fn(*mut ManagedVersioned)>,
    pub flags: u64,
    pub tensor: DlTensor,
}

/// Told what went wrong: a context, the name of an exception, a text.
pub type SetError = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_char);

/// Functions of a library for tensors of a type of its own, without Python calls: `type(x).__dlpack_c_exchange_api__`, a
/// capsule of the name [`EXCHANGE_NAME`]. They return 0, or −1 with an exception set.
#[repr(C)]
#[derive(Debug)]
pub struct ExchangeApi {
    pub version: Version,
    /// One of an older major version, or null.
    pub previous: *const ExchangeApi,
    /// A new tensor of the prototype's type, shape and device.
    pub allocate:
        Option<unsafe extern "C" fn(*mut DlTensor, *mut *mut ManagedVersioned, *mut c_void, SetError) -> c_int>,
    /// A Python tensor with a claim on its memory.
    pub managed_from_object: Option<unsafe extern "C" fn(*mut c_void, *mut *mut ManagedVersioned) -> c_int>,
    /// A Python tensor made of one; takes the claim.
    pub managed_to_object: Option<unsafe extern "C" fn(*mut ManagedVersioned, *mut *mut c_void) -> c_int>,
    /// A Python tensor, for as long as that lives; may be missing.
    pub from_object: Option<unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int>,
    /// The stream that the library works in now.
    pub current_stream: Option<unsafe extern "C" fn(i32, i32, *mut *mut c_void) -> c_int>,
}

// SAFETY: a table is written before it is shown and never after.
unsafe impl Sync for ExchangeApi {}

/// Name of the capsule with an [`ExchangeApi`].
pub const EXCHANGE_NAME: &std::ffi::CStr = c"dlpack_exchange_api";

/// A claim on a tensor's memory, let go of when dropped.
#[derive(Debug)]
pub struct Held(Claim);

#[derive(Debug)]
enum Claim {
    Old(*mut Managed),
    Versioned(*mut ManagedVersioned),
}

impl Held {
    /// # Safety
    /// The claim on `managed` is the caller's and nobody else's.
    pub unsafe fn versioned(managed: *mut ManagedVersioned) -> Self {
        Self(Claim::Versioned(managed))
    }

    /// # Safety
    /// As of [`Held::versioned`].
    pub unsafe fn old(managed: *mut Managed) -> Self {
        Self(Claim::Old(managed))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        match self.0 {
            Claim::Old(managed) => {
                // SAFETY: the claim is ours, and its deleter is called once; Python's lock is held wherever tensors are.
                if let Some(deleter) = unsafe { (*managed).deleter } {
                    // SAFETY: as above.
                    unsafe { deleter(managed) }
                }
            }
            Claim::Versioned(managed) => {
                // SAFETY: as above.
                if let Some(deleter) = unsafe { (*managed).deleter } {
                    // SAFETY: as above.
                    unsafe { deleter(managed) }
                }
            }
        }
    }
}
