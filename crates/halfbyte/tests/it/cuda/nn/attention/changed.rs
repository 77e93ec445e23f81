//! Scores that a model changes: caps, slopes and sinks.

use super::*;

#[test]
fn caps_slopes_and_sinks_are_within_the_bound() {
    for gpu in gpus() {
        let mut random = Random(23);
        for case in 0..24 {
            let head_size = [64, 128, 20, 80, 256, 8 * (1 + random.below(32))][case % 6];
            if head_size > 128 && gpu.caps().shared_bytes < 100_000 {
                continue;
            }
            let kv_heads = 1 + random.below(3);
            let heads = Heads { heads: kv_heads * (1 + random.below(7)), kv_heads, head_size };
            let mut text = Text::new(&gpu, heads, 0, KvType::ALL[case / 2 % 4]);
            text.window = (case % 4 == 3).then(|| 1 + random.below(300));
            text.cap = (case % 2 == 0).then(|| 0.5 + random.below(50) as f32);
            if case % 3 == 0 {
                text.slopes = text.of_heads((1..=heads.heads).map(|h| 0.8f32.powi(h as i32)).collect());
            }
            if case % 3 != 1 {
                text.sinks = text.of_heads(random.normals(heads.heads).iter().map(|v| 3.0 * v).collect());
            }
            for (step, m) in [1, 30, 1, 97, 1, 1, 160, 1, 1, 60, 1].into_iter().enumerate() {
                text.read(&random.normals(m * heads.row()), TYPES[(case + step) % 3]);
            }
        }
    }
}
