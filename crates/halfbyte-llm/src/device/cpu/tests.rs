use crate::device::{Room, Rows};
use crate::{LoadOptions, Model, Session};
use halfbyte::cpu::Cpu;
use halfbyte::kernel::KvType;
use std::path::Path;

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
