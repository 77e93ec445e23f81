use crate::device::{Room, Rows};
use crate::{LoadOptions, Model, Session};
use halfbyte::cpu::Cpu;
use halfbyte::kernel::KvType;
use std::path::Path;

/// What is explained is what computes, for every number of rows.
#[test]
fn every_number_of_rows_is_explained_by_its_kernel() {
    use halfbyte::quantize::{Rtn, rtn};
    use halfbyte::{Float, Floats, Format, Linear, Weight};
    let cpu = Cpu::new(1).unwrap();
    for name in ["w4a16-g128", "w4a8-g32", "w8a8", "w2a16-g64-asym", "w4a16-g16-float"] {
        let format: Format = name.parse().unwrap();
        let w: Vec<f32> = (0..64 * 384).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
        let q = rtn(Floats::F32(&w), [64, 384], format.weight, Rtn::default()).unwrap();
        let layer = Linear::on(&cpu, Weight::Quantized(&q, format.act)).unwrap();
        let kernels = layer.kernels(&cpu, Float::F32, Float::F32).unwrap();
        assert_eq!(kernels[0].0, 1);
        for m in 1..600 {
            let (_, told) = *kernels.iter().rfind(|(first, _)| *first <= m).unwrap();
            assert_eq!(layer.kernel(&cpu, m, Float::F32, Float::F32).unwrap(), told, "{name}, {m} rows");
        }
    }
}

#[test]
fn a_text_alone_and_among_many_has_keys_and_values_of_the_type_that_was_asked_for() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/stdlib-11m");
    let (cpu, tokens) = (Cpu::new(1).unwrap(), (0..150).map(|i| (i * 37) % 4096).collect::<Vec<u32>>());
    let mut seen = Vec::new();
    for kv in KvType::ALL {
        let model = Model::load(&folder, &LoadOptions { kv: Some(kv), ..LoadOptions::default() }).unwrap();
        let alone = Session::new(&model, &cpu, 150).unwrap().prefill(&tokens).unwrap().to_vec();
        let mut texts = model.begin_many(&cpu, Room { positions: 256, longest: 256, texts: 1, rows: 150 }).unwrap();
        let text = texts.begin();
        texts.reserve(text, tokens.len()).unwrap();
        texts.read(&[Rows { text, tokens: &tokens }], 1).unwrap();
        let mut among_many = Vec::new();
        texts.logits(&mut among_many).unwrap();
        assert_eq!(alone, among_many, "{kv}");
        // Each rounds in its own way, and none by much.
        assert!(!seen.contains(&alone), "{kv}");
        let exact = seen.first().unwrap_or(&alone);
        let worst = alone.iter().zip(exact).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        assert!(worst < 0.5, "{kv}: off by {worst}");
        seen.push(alone);
    }
}
