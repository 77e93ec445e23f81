//! Tensor maps: what the copy engine of a Hopper multiprocessor must know of a matrix in memory.

use super::check;
use super::memory::{FloatView, View};
use crate::error::{Error, Result};
use crate::tensor::Float;
use cudarc::driver::sys;

/// A map as kernels take it: a parameter declared `const __grid_constant__`.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct TensorMap(sys::CUtensorMap);

impl std::fmt::Debug for TensorMap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TensorMap")
    }
}

/// How 16-byte pieces of a box's rows are exchanged in shared memory, so that columns meet all banks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Swizzle {
    /// Not at all.
    #[default]
    None,
    /// Within 32 bytes.
    Bytes32,
    /// Within 64 bytes.
    Bytes64,
    /// Within 128 bytes.
    Bytes128,
}

impl Swizzle {
    /// The longest row of a box, in bytes; none: no limit but the box's own.
    fn row_bytes(self) -> Option<u32> {
        match self {
            Swizzle::None => None,
            Swizzle::Bytes32 => Some(32),
            Swizzle::Bytes64 => Some(64),
            Swizzle::Bytes128 => Some(128),
        }
    }

    fn number(self) -> sys::CUtensorMapSwizzle {
        match self {
            Swizzle::None => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Bytes32 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Bytes64 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Bytes128 => sys::CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        }
    }
}

/// How much the second-level cache fetches at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Promotion {
    /// What is asked for.
    None,
    /// 64 bytes.
    Bytes64,
    /// 128 bytes.
    Bytes128,
    /// 256 bytes.
    #[default]
    Bytes256,
}

impl Promotion {
    fn number(self) -> sys::CUtensorMapL2promotion {
        match self {
            Promotion::None => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            Promotion::Bytes64 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
            Promotion::Bytes128 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            Promotion::Bytes256 => sys::CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        }
    }
}

/// Boxes of a row-major matrix.
#[derive(Clone, Copy, Debug)]
pub struct Tiles {
    /// Rows and columns of the matrix.
    pub shape: [usize; 2],
    /// Elements from a row to the next.
    pub stride: usize,
    /// Rows and columns of a box.
    pub tile: [u32; 2],
    /// Order in shared memory.
    pub swizzle: Swizzle,
    /// Fetches of the second-level cache.
    pub promotion: Promotion,
}

/// Windows on images that lie pixel by pixel: a box is some channels of the pixels that one position of a kernel sees, for
/// output pixels that follow each other through rows and images.
#[derive(Clone, Copy, Debug)]
pub struct Windows {
    /// Images, rows, columns, channels.
    pub shape: [usize; 4],
    /// Elements from a pixel to the next, of which the first channels count; pixels of more channels overlap.
    pub pixel: usize,
    /// Pixels from one output to the next, down and across.
    pub stride: [usize; 2],
    /// Rows and columns of zeros above and left of an image, where windows begin.
    pub padding: [usize; 2],
    /// Rows and columns that all output pixels of an image begin in: the last ones begin in the last of them, or before.
    pub extent: [usize; 2],
    /// Output pixels and channels of a box.
    pub tile: [u32; 2],
    /// Order in shared memory.
    pub swizzle: Swizzle,
    /// Fetches of the second-level cache.
    pub promotion: Promotion,
}

/// Least and greatest corner of the pixels that windows begin in, from those of an image.
const CORNERS: std::ops::RangeInclusive<i64> = -128..=127;

impl Windows {
    /// The corners that windows begin between, columns first: from the first pixel of an image on, and from its last.
    /// None: they are too far out for the copy engine.
    fn corners(&self) -> Option<[[i32; 2]; 2]> {
        let corner = |axis: usize| {
            let lower = -i64::try_from(self.padding[axis]).ok()?;
            let end = lower.checked_add(i64::try_from(self.extent[axis]).ok()?)?;
            let upper = end.checked_sub(i64::try_from(self.shape[1 + axis]).ok()?)?;
            (CORNERS.contains(&lower) && CORNERS.contains(&upper)).then_some([lower as i32, upper as i32])
        };
        let [down, across] = [corner(0)?, corner(1)?];
        Some([[across[0], down[0]], [across[1], down[1]]])
    }

    /// Whether the copy engine takes them, but for addresses.
    pub fn are_taken(&self) -> bool {
        let stride = self.stride.iter().all(|stride| (1..=8).contains(stride));
        let sizes = self.shape.iter().all(|&size| (1..=i32::MAX as usize).contains(&size));
        let [pixels, channels] = self.tile;
        let tile = (1..=1024).contains(&pixels) && (1..=256).contains(&channels);
        stride && sizes && tile && self.pixel > 0 && self.corners().is_some()
    }
}

impl TensorMap {
    /// The map of windows on images of 2-byte floats or of bytes at an address of so many elements; what lies outside of an
    /// image, or past the last channel, comes as zeros.
    ///
    /// Errors: images beyond the elements, and what the copy engine does not take: see [`Windows::are_taken`]; pixels that do
    /// not begin at multiples of 16 bytes; boxes of pixels that are no multiple of 16 bytes, or longer than the swizzle.
    pub fn of_windows(data: View<'_, u8>, element: usize, windows: &Windows) -> Result<Self> {
        const OP: &str = "tensor map";
        let Windows { shape: [images, rows, columns, channels], pixel, tile, swizzle, promotion, .. } = *windows;
        let refuse = |expected: &str| Err(Error::invalid(OP, expected, format!("{windows:?}")));
        let dtype = match element {
            1 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
            2 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT16,
            _ => return refuse("elements of 1 or 2 bytes"),
        };
        let (Some([lower, upper]), true) = (windows.corners(), windows.are_taken()) else {
            return refuse("windows that the copy engine takes");
        };
        let pixels = [images, rows, columns].iter().try_fold(1usize, |all, &size| all.checked_mul(size));
        let elements = pixels.and_then(|pixels| (pixels - 1).checked_mul(pixel)?.checked_add(channels));
        let bytes = elements.and_then(|elements| elements.checked_mul(element));
        if bytes.is_none_or(|bytes| bytes > data.len()) {
            return refuse(&format!("images within {} bytes", data.len()));
        }
        if !data.pointer().is_multiple_of(16) || !(pixel * element).is_multiple_of(16) {
            return refuse("pixels that begin at multiples of 16 bytes");
        }
        let row_bytes = tile[1] * element as u32;
        if !row_bytes.is_multiple_of(16) || swizzle.row_bytes().is_some_and(|most| row_bytes > most) {
            return refuse("boxes of 16-byte pieces that fit the swizzle");
        }
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // The driver counts dimensions from the innermost.
        let extents = [channels as u64, columns as u64, rows as u64, images as u64];
        let step = (pixel * element) as u64;
        let strides = [step, step * columns as u64, step * (columns * rows) as u64];
        let steps = [1, windows.stride[1] as u32, windows.stride[0] as u32, 1];
        // SAFETY: the arrays have as many entries as the map has dimensions; the driver only writes the map, and whoever
        // holds a view of device memory has opened the driver.
        let result = unsafe {
            sys::cuTensorMapEncodeIm2col(
                &mut map,
                dtype,
                4,
                data.pointer() as *mut std::ffi::c_void,
                extents.as_ptr(),
                strides.as_ptr(),
                lower.as_ptr(),
                upper.as_ptr(),
                tile[1],
                tile[0],
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle.number(),
                promotion.number(),
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(OP, result)?;
        Ok(Self(map))
    }

    /// The map of a matrix whose boxes are filled with zeros beyond its edges.
    ///
    /// Errors: what the copy engine does not take: an address or a row that does not begin at 16 bytes, a box of more than
    /// 256 rows or columns or of rows longer than the swizzle; a driver that does not know maps.
    pub fn of_matrix(data: FloatView<'_>, tiles: &Tiles) -> Result<Self> {
        let dtype = match data.dtype() {
            Float::F16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            Float::BF16 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            Float::F32 => sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
        };
        Self::encode([data.pointer(), data.len() as u64], data.dtype().size_bytes(), dtype, tiles)
    }

    /// The same of a matrix of bytes.
    pub fn of_bytes(data: View<'_, u8>, tiles: &Tiles) -> Result<Self> {
        let dtype = sys::CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8;
        Self::encode([data.pointer(), data.len() as u64], 1, dtype, tiles)
    }

    fn encode([data, len]: [u64; 2], element: usize, dtype: sys::CUtensorMapDataType, tiles: &Tiles) -> Result<Self> {
        const OP: &str = "tensor map";
        let Tiles { shape: [rows, columns], stride, tile: [tile_rows, tile_columns], swizzle, promotion } = *tiles;
        let needed = rows.saturating_sub(1).checked_mul(stride).and_then(|start| start.checked_add(columns));
        let shape = || format!("{rows} × {columns}, {stride} elements from row to row");
        if rows == 0 || columns == 0 || stride < columns || needed.is_none_or(|needed| needed as u64 > len) {
            return Err(Error::invalid(OP, format!("a matrix within {len} elements"), shape()));
        }
        if !data.is_multiple_of(16) || !(stride * element).is_multiple_of(16) {
            return Err(Error::invalid(OP, "rows that begin at multiples of 16 bytes", shape()));
        }
        let row_bytes = u64::from(tile_columns) * element as u64;
        if !(1..=256).contains(&tile_rows)
            || !(1..=256).contains(&tile_columns)
            || !row_bytes.is_multiple_of(16)
            || swizzle.row_bytes().is_some_and(|most| row_bytes > u64::from(most))
        {
            let expected = format!("boxes of up to 256 × 256 with rows of 16-byte pieces that fit swizzle {swizzle:?}");
            return Err(Error::invalid(OP, expected, format!("{tile_rows} × {tile_columns}")));
        }
        let mut map = sys::CUtensorMap { opaque: [0; 16] };
        // The driver counts dimensions from the innermost.
        let extents = [columns as u64, rows as u64];
        let strides = [(stride * element) as u64];
        let tile = [tile_columns, tile_rows];
        let steps = [1u32; 2];
        // SAFETY: the arrays have as many entries as the map has dimensions; the driver only writes the map, and whoever
        // holds a view of device memory has opened the driver.
        let result = unsafe {
            sys::cuTensorMapEncodeTiled(
                &mut map,
                dtype,
                2,
                data as *mut std::ffi::c_void,
                extents.as_ptr(),
                strides.as_ptr(),
                tile.as_ptr(),
                steps.as_ptr(),
                sys::CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                swizzle.number(),
                promotion.number(),
                sys::CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
            )
        };
        check(OP, result)?;
        Ok(Self(map))
    }
}
