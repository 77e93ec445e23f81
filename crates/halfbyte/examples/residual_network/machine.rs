//! What the network needs of a device beside layers: tensors, their sums and means.

use halfbyte::cpu::Cpu;
use halfbyte::format::int8::{Mean, Sum};
use halfbyte::ops::Device;
use halfbyte::{Float, Result};

/// What floats a layer reads, as the device of a machine has them.
pub type X<'a, M> = <<M as Machine>::Device as Device>::X<'a>;
pub type Y<'a, M> = <<M as Machine>::Device as Device>::Y<'a>;
pub type XBytes<'a, M> = <<M as Machine>::Device as Device>::XBytes<'a>;
pub type YBytes<'a, M> = <<M as Machine>::Device as Device>::YBytes<'a>;

/// A device with tensors of its own.
pub trait Machine {
    type Device: Device;
    /// Floats in the memory of the device.
    type Floats;
    /// Bytes there.
    type Bytes;
    /// Type of the images between two layers.
    const IMAGES: Float;

    fn device(&self) -> &Self::Device;
    /// Room for floats of a type: the device may take a wider one.
    fn floats(&self, dtype: Float, len: usize) -> Result<Self::Floats>;
    fn bytes(&self, len: usize) -> Result<Self::Bytes>;
    fn x(values: &Self::Floats) -> X<'_, Self>;
    fn y(values: &mut Self::Floats) -> Y<'_, Self>;
    fn x_bytes(codes: &Self::Bytes) -> XBytes<'_, Self>;
    fn y_bytes(codes: &mut Self::Bytes) -> YBytes<'_, Self>;
    /// Images, rounded to their type.
    fn upload(&self, values: &[f32]) -> Result<Self::Floats>;
    fn upload_bytes(&self, codes: &[u8]) -> Result<Self::Bytes>;
    /// Floats on the host, widened, once the work before is done.
    fn download(&self, values: &Self::Floats) -> Result<Vec<f32>>;
    fn download_bytes(&self, codes: &Self::Bytes) -> Result<Vec<u8>>;
    /// The relu of a sum.
    fn add(&self, x: [&Self::Floats; 2], y: &mut Self::Floats) -> Result<()>;
    fn add_codes(&self, sum: &Sum, x: [&Self::Bytes; 2], y: &mut Self::Bytes) -> Result<()>;
    /// Means over the pixels of `[batch, pixels, channels]`.
    fn mean(&self, x: &Self::Floats, size: [usize; 3], y: &mut Self::Floats) -> Result<()>;
    fn mean_codes(&self, mean: &Mean, x: &Self::Bytes, size: [usize; 3], y: &mut Self::Bytes) -> Result<()>;
}

impl Machine for Cpu {
    type Device = Cpu;
    type Floats = Vec<f32>;
    type Bytes = Vec<u8>;
    const IMAGES: Float = Float::F32;

    fn device(&self) -> &Cpu {
        self
    }

    fn floats(&self, _: Float, len: usize) -> Result<Vec<f32>> {
        Ok(vec![0.0; len])
    }

    fn bytes(&self, len: usize) -> Result<Vec<u8>> {
        Ok(vec![0; len])
    }

    fn x(values: &Vec<f32>) -> X<'_, Self> {
        values.into()
    }

    fn y(values: &mut Vec<f32>) -> Y<'_, Self> {
        values.into()
    }

    fn x_bytes(codes: &Vec<u8>) -> XBytes<'_, Self> {
        codes.into()
    }

    fn y_bytes(codes: &mut Vec<u8>) -> YBytes<'_, Self> {
        codes.into()
    }

    fn upload(&self, values: &[f32]) -> Result<Vec<f32>> {
        Ok(values.to_vec())
    }

    fn upload_bytes(&self, codes: &[u8]) -> Result<Vec<u8>> {
        Ok(codes.to_vec())
    }

    fn download(&self, values: &Vec<f32>) -> Result<Vec<f32>> {
        Ok(values.clone())
    }

    fn download_bytes(&self, codes: &Vec<u8>) -> Result<Vec<u8>> {
        Ok(codes.clone())
    }

    fn add(&self, [a, b]: [&Vec<f32>; 2], y: &mut Vec<f32>) -> Result<()> {
        y.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (a, b))| *y = (a + b).max(0.0));
        Ok(())
    }

    fn add_codes(&self, sum: &Sum, [a, b]: [&Vec<u8>; 2], y: &mut Vec<u8>) -> Result<()> {
        y.iter_mut().zip(a.iter().zip(b)).for_each(|(y, (&a, &b))| *y = sum.code(a.into(), b.into()) as u8);
        Ok(())
    }

    fn mean(&self, x: &Vec<f32>, [_, pixels, channels]: [usize; 3], y: &mut Vec<f32>) -> Result<()> {
        for (sums, image) in y.chunks_exact_mut(channels).zip(x.chunks_exact(pixels * channels)) {
            for pixel in image.chunks_exact(channels) {
                sums.iter_mut().zip(pixel).for_each(|(sum, v)| *sum += v);
            }
            sums.iter_mut().for_each(|sum| *sum /= pixels as f32);
        }
        Ok(())
    }

    fn mean_codes(&self, mean: &Mean, x: &Vec<u8>, size: [usize; 3], y: &mut Vec<u8>) -> Result<()> {
        let [_, pixels, channels] = size;
        for (codes, image) in y.chunks_exact_mut(channels).zip(x.chunks_exact(pixels * channels)) {
            let mut sums = vec![0i32; channels];
            for pixel in image.chunks_exact(channels) {
                sums.iter_mut().zip(pixel).for_each(|(sum, &code)| *sum += i32::from(code));
            }
            codes.iter_mut().zip(sums).for_each(|(code, sum)| *code = mean.code(sum) as u8);
        }
        Ok(())
    }
}
