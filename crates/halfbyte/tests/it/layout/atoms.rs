//! Where codes, scales and zero points for tensor cores lie.

use super::*;

/// Codes, scales, a zero point and an offset by hand, where the drawing says that they lie.
#[test]
fn codes_for_tensor_cores_lie_where_the_layout_says() {
    let mut random = Random(13);
    let w = random.qtensor(parse("w4a16-g64-asym").weight, [400, 512], false);
    let packed = CudaWna16::pack(&w, Act::A16).unwrap();
    let bytes = packed.atom().bytes();
    assert_eq!(bytes, 4 * (1024 + 2 * 32 + 2 * 16));
    // Output 300 is row 44 of strip 4, the first of the second super-strip, which has 3; column 421 is 37 of step 3.
    let atom = &packed.atoms()[(4 * 4 + 3 * 3) * bytes..][..bytes];
    // Row 44 = 16·2 + 12: warp 2, lane/4 = 4, upper half; column 37 = 16·2 + 5: half 0, word 2, lane%4 = 2, odd.
    let word = 2 * 1024 + ((4 * 4 + 2) * 4 + 2) * 4;
    let word = u32::from_le_bytes(atom[word..word + 4].try_into().unwrap());
    assert_eq!((word >> 20 & 15) as u8, w.codes()[300 * 512 + 421]);
    // Its group is 6, the first of the atom; scales of rows 36 and 44 are the fifth pair of unit 2.
    let params = &atom[4096 + 2 * (2 * 32 + 2 * 16)..];
    let scale = (2 * 4 + 1) * 2;
    let scale = f16::from_le_bytes(params[scale..scale + 2].try_into().unwrap()).to_f32();
    assert_eq!(scale, w.scales()[300 * 8 + 6]);
    let Zeros::Integer(zeros) = w.zeros() else { panic!() };
    let at_zeros = 2 * 32 + 2 * 4 + 1;
    assert_eq!([0, 16].map(|group| u16::from(params[at_zeros + group])), zeros[300 * 8 + 6..][..2]);

    let w = random.qtensor(parse("w4a16-g32-float-sf32").weight, [64, 128], false);
    let packed = CudaWna16::pack(&w, Act::A16).unwrap();
    assert_eq!(packed.atoms().len(), 4 * (1024 + 4 * 64 + 4 * 64));
    // Row 27 = 16·1 + 11: unit 1, the fourth pair, upper half; scale and offset of group 2.
    let params = &packed.atoms()[4096 + 8 * 64..];
    let float = |at: usize| f32::from_le_bytes(params[at..at + 4].try_into().unwrap());
    let Zeros::Float(offsets) = w.zeros() else { panic!() };
    let [at_scale, at_offset] = [0, 4 * 64].map(|first| first + 2 * 64 + (2 * 3 + 1) * 4);
    assert_eq!([float(at_scale), float(at_offset)], [w.scales()[27 * 4 + 2], offsets[27 * 4 + 2]]);

    let w = random.qtensor(parse("w8a16").weight, [64, 256], false);
    let packed = CudaWna16::pack(&w, Act::A16).unwrap();
    // Row 59 = 16·3 + 11: warp 3, lane/4 = 3, upper half; column 128 + 93 = 32·2 + 16 + 8 + 2·2 + 1.
    let byte = 8192 + ((3 * 4 + 2) * 128 + (3 * 4 + 2) * 4 + 3) * 4 + 3;
    assert_eq!(packed.atoms()[byte], w.codes()[59 * 256 + 221]);
    assert_eq!(f16::from_le_bytes([packed.rows()[2 * 55], packed.rows()[2 * 55 + 1]]).to_f32(), w.scales()[59]);
}

/// Words with the factors beside them, made bytes as the kernel does it: one multiply-add for four codes, and one XOR.
#[test]
fn words_and_factors_make_the_bytes_of_weights() {
    let mut random = Random(16);
    for name in ["w4a8-g128-si8", "w4a8-g64-asym-si8", "w4a8-g32-asym-sbf16-si8"] {
        let [n, k] = [128, 256];
        let w = random.qtensor(parse(name).weight, [n, k], false);
        let packed = CudaWna16::pack(&w, Act::A8).unwrap();
        let (bytes, group) = (packed.atom().bytes(), packed.atom().group);
        let (factors, mut seen) = (w.factors().unwrap(), 0);
        for (at, atom) in packed.atoms().chunks_exact(bytes).enumerate() {
            // Two strips: atoms of a step lie beside each other.
            let [strip, step] = [at % 2, at / 2];
            for i in 0..1024 {
                let (warp, half, lane, j) = (i / 256, i / 128 % 2, i / 4 % 32, i % 4);
                let params = &atom[4096 + warp * (bytes / 4 - 1024)..];
                let word = u32::from_le_bytes([0, 1, 2, 3].map(|byte| atom[4 * i + byte]));
                let column = 64 * half + 16 * j + 2 * (lane % 4);
                let slot = column / group * 32 + lane / 4 * 4;
                let [f, b, f8, b8] = [0, 1, 2, 3].map(|byte| u32::from(params[slot + byte]));
                for (row, shift, f, b) in [(0, 0, f, b), (8, 4, f8, b8)] {
                    let four = (word >> shift & 0x0f0f_0f0f) * f + b * 0x0101_0101;
                    let four = (four ^ 0x8080_8080).to_le_bytes();
                    for (byte, right) in four.into_iter().zip([0, 8, 1, 9]) {
                        let (i, c) = (64 * strip + 16 * warp + lane / 4 + row, 128 * step + column + right);
                        let code = i32::from(w.codes()[i * k + c]) - w.zero_point(i, w.group_of(c)).unwrap() as i32;
                        let weight = code * i32::from(factors[i * w.groups() + w.group_of(c)]);
                        assert_eq!(i32::from(byte as i8), weight, "{name}: row {i}, column {c}");
                        seen += 1;
                    }
                }
            }
        }
        assert_eq!(seen, n * k);
        // Scales of rows in the order of the drawing.
        let channel = packed.rows()[2 * 35..][..2].try_into().map(u16::from_le_bytes).unwrap();
        let wide = match packed.atom().scale {
            halfbyte::Float::BF16 => half::bf16::from_bits(channel).to_f32(),
            _ => f16::from_bits(channel).to_f32(),
        };
        assert_eq!(wide, w.channel_scales().unwrap()[32 + 1 + 8]);
    }
}
