//! Tensors that other software computed, from `testdata`.

use half::{bf16, f16};
use halfbyte::FloatData;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// The tensors of a file.
pub struct Golden(BTreeMap<String, (Dtype, Vec<usize>, Vec<u8>)>);

/// A path in the crate's test data: of the repository, or of what `HALFBYTE_ROOT` names instead, what of it was brought to another
/// machine.
pub fn path(name: &str) -> PathBuf {
    let brought = std::env::var_os("HALFBYTE_ROOT").map(PathBuf::from);
    let root = brought.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../.."));
    root.join("crates/halfbyte/testdata").join(name)
}

impl Golden {
    /// Reads `testdata/<name>.safetensors`.
    pub fn read(name: &str) -> Self {
        let path = path(&format!("{name}.safetensors"));
        let bytes = std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        let file = SafeTensors::deserialize(&bytes).unwrap();
        let tensor = |(name, t): (&str, safetensors::tensor::TensorView<'_>)| {
            (name.to_owned(), (t.dtype(), t.shape().to_vec(), t.data().to_vec()))
        };
        Self(file.iter().map(tensor).collect())
    }

    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name)
    }

    pub fn shape(&self, name: &str) -> &[usize] {
        &self.0[name].1
    }

    pub fn f32s(&self, name: &str) -> Vec<f32> {
        let (dtype, _, data) = &self.0[name];
        assert_eq!(*dtype, Dtype::F32, "{name}");
        data.as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect()
    }

    /// Floats of any of the three types, as they are.
    pub fn floats(&self, name: &str) -> FloatData<'static> {
        let (dtype, _, data) = &self.0[name];
        let halfs = || data.as_chunks::<2>().0.iter().map(|v| u16::from_le_bytes(*v));
        match dtype {
            Dtype::F16 => FloatData::F16(halfs().map(f16::from_bits).collect::<Vec<_>>().into()),
            Dtype::BF16 => FloatData::BF16(halfs().map(bf16::from_bits).collect::<Vec<_>>().into()),
            _ => FloatData::F32(self.f32s(name).into()),
        }
    }

    pub fn f64s(&self, name: &str) -> Vec<f64> {
        let (dtype, _, data) = &self.0[name];
        assert_eq!(*dtype, Dtype::F64, "{name}");
        data.as_chunks::<8>().0.iter().map(|v| f64::from_le_bytes(*v)).collect()
    }

    /// Integers of any of the types that the files hold, widened.
    pub fn ints(&self, name: &str) -> Vec<i32> {
        let (dtype, _, data) = &self.0[name];
        match dtype {
            Dtype::I32 => data.as_chunks::<4>().0.iter().map(|v| i32::from_le_bytes(*v)).collect(),
            Dtype::I8 => data.iter().map(|&v| i32::from(v as i8)).collect(),
            Dtype::U8 => data.iter().map(|&v| i32::from(v)).collect(),
            other => panic!("{name} is {other:?}"),
        }
    }

    /// Elements of any type as their bytes.
    pub fn bits(&self, name: &str) -> &[u8] {
        &self.0[name].2
    }

    /// Bytes as their bits, and whether they are signed.
    pub fn bytes(&self, name: &str) -> (bool, Vec<u8>) {
        let (dtype, _, data) = &self.0[name];
        assert!(matches!(dtype, Dtype::I8 | Dtype::U8), "{name} is {dtype:?}");
        (*dtype == Dtype::I8, data.clone())
    }
}
