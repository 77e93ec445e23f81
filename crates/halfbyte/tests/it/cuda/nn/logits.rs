//! Tokens from logits: the greatest, and draws.

use super::Bench;
use crate::cuda::gpus;
use crate::data::Random;
use halfbyte::cuda::driver::Stream;
use halfbyte::cuda::nn::{self, Draw, Drawn, HostTokens, Step, TokenPlaces};

#[test]
fn the_greatest_logit_is_the_first_of_equals_and_the_text_goes_on() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(4));
        for (i, len) in [1, 2, 3, 5, 31, 33, 1000, 4096, 40_003, 128_256, 300_001].into_iter().enumerate() {
            // Not every vocabulary begins at a multiple of 16 bytes.
            let before = i % 4;
            let run = |logits: &[f32]| {
                let padded = [&[f32::NAN; 4][..before], logits, &[f32::NAN; 4]].concat();
                let values = bench.upload(&padded);
                let (mut choice, mut token, mut position) =
                    (bench.upload(&[9u32; 2]), bench.upload(&[9u32]), bench.upload(&[40u32]));
                let step = Step {
                    logits: values.view().slice(before..before + len),
                    choice: choice.view_mut(),
                    tokens: token.view_mut(),
                    positions: position.view_mut(),
                    advance: 3,
                    host: None,
                };
                nn::argmax(&gpu, &bench.stream, step).unwrap();
                let choice = bench.read(choice.view());
                assert_eq!((bench.read(token.view())[0], bench.read(position.view())[0]), (choice[0], 43));
                (choice[0] as usize, f32::from_bits(choice[1]))
            };
            let mut logits = random.normals(len);
            for _ in 0..4 {
                let at = random.below(len);
                logits[at] = 50.0;
                let first = logits.iter().position(|&v| v == 50.0).unwrap();
                assert_eq!(run(&logits), (first, 50.0));
            }
            let (first, second) = (random.below(len), random.below(len));
            logits[first] = f32::INFINITY;
            logits[second] = f32::INFINITY;
            assert_eq!(run(&logits), (first.min(second), f32::INFINITY));
            // NaN of either sign is greater than all, and of some the first is taken.
            let (first, second) = (random.below(len), random.below(len));
            (logits[first], logits[second]) = (f32::NAN, -f32::NAN);
            let (index, value) = run(&logits);
            assert!(index == first.min(second) && value.to_bits() == logits[index].to_bits(), "{index}: {value}");
            assert_eq!(run(&vec![f32::NEG_INFINITY; len]), (0, f32::NEG_INFINITY));
            // Zeros of both signs are equal.
            let mut zeros = vec![0.0; len];
            zeros[0] = -0.0;
            let (index, value) = run(&zeros);
            assert!(index == 0 && value.to_bits() == (-0.0f32).to_bits());
        }
    }
}

/// A step that is recorded and replayed goes on each time.
#[test]
fn the_choice_of_a_token_can_be_recorded() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(13));
        let mut logits = random.normals(50_000);
        logits[44_444] = 9.0;
        let values = bench.upload(&logits);
        let (mut choice, mut token, mut position) =
            (bench.upload(&[9u32; 2]), bench.upload(&[9u32]), bench.upload(&[40u32]));
        let work = |stream: &Stream| {
            let step = Step {
                logits: values.view(),
                choice: choice.view_mut(),
                tokens: token.view_mut(),
                positions: position.view_mut(),
                advance: 1,
                host: None,
            };
            nn::argmax(&gpu, stream, step)
        };
        bench.stream.time_replays(2, 5, work).unwrap();
        assert_eq!((bench.read(token.view())[0], bench.read(position.view())[0]), (44_444, 47));
        assert_eq!(bench.read(choice.view()), [44_444, 9.0f32.to_bits()]);
    }
}

/// The token that a draw must give, in f64, and how far `random` is from where another begins.
fn drawn(logits: &[f32], temperature: f32, top_k: usize, top_p: f32, random: f64) -> (usize, f64) {
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |i: usize| f64::from((logits[i] - most) * (1.0 / temperature)).exp();
    let mut order: Vec<usize> = (0..logits.len()).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    if top_k > 0 {
        order.truncate(top_k);
    }
    let mut slack = f64::INFINITY;
    if top_p < 1.0 {
        let wanted = order.iter().map(|&i| weight(i)).sum::<f64>() * f64::from(top_p);
        let mut sum = 0.0;
        let count = order.iter().position(|&i| {
            sum += weight(i);
            slack = slack.min((sum / wanted - 1.0).abs());
            sum >= wanted
        });
        order.truncate(count.map_or(order.len(), |last| last + 1));
    } else {
        order.sort_unstable();
    }
    let total: f64 = order.iter().map(|&i| weight(i)).sum();
    let (mut sum, mut token) = (0.0, None);
    for &i in &order {
        sum += weight(i);
        slack = slack.min((sum / total - random).abs());
        if sum > random * total && token.is_none() {
            token = Some(i);
        }
    }
    (token.unwrap_or(0), slack)
}

#[test]
fn draws_are_those_of_the_definition() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(9));
        for (round, len) in [1, 2, 33, 600, 4096, 50_000].into_iter().enumerate() {
            let mut logits: Vec<f32> = random.normals(len).iter().map(|v| v * 3.0).collect();
            if len > 100 {
                // Equals at the top, and tokens that never come.
                let top = 12.0;
                (0..5).for_each(|i| logits[i * 7] = top);
                (0..20).for_each(|i| logits[i * 3 + 1] = f32::NEG_INFINITY);
            }
            let values = bench.upload(&logits);
            let (mut choice, mut token, mut position) =
                (bench.upload(&[0u32; 2]), bench.upload(&[0u32]), bench.upload(&[0u32]));
            let step = Step {
                logits: values.view(),
                choice: choice.view_mut(),
                tokens: token.view_mut(),
                positions: position.view_mut(),
                advance: 1,
                host: None,
            };
            nn::argmax(&gpu, &bench.stream, step).unwrap();
            let mut distinct = std::collections::BTreeSet::new();
            for i in 0..60 {
                let temperature = [1.0, 0.7, 1.8, 1e-30][(i + round) % 4];
                let (top_k, top_p) = [(0, 1.0), (40, 1.0), (0, 0.9), (50, 0.95), (3, 0.6), (1, 0.5)][i % 6];
                let at = if i < 6 { 0.0 } else { (random.bits() >> 11) as f64 / (1u64 << 53) as f64 };
                let (want, slack) = drawn(&logits, temperature, top_k, top_p, at);
                let mut drawn = bench.upload(&[9u32; 2]);
                let of = Drawn {
                    logits: values.view(),
                    choice: choice.view(),
                    drawn: drawn.view_mut(),
                    tokens: token.view_mut(),
                    host: None,
                };
                let draw = Draw { temperature, top_k, top_p, random: at };
                nn::sample(&gpu, &bench.stream, &[draw], of).unwrap();
                let got = bench.read(drawn.view());
                let what = format!("{len} logits, {temperature} {top_k} {top_p} {at}: {got:?}, expected {want}");
                assert_eq!(bench.read(token.view())[0], got[0]);
                assert!(got[0] as usize == want || slack < 1e-5, "{what}, {slack:e} from a border");
                assert!(logits[got[0] as usize] > f32::NEG_INFINITY, "{what}");
                distinct.insert(got[0]);
            }
            // The definition itself draws 1, 2, 6, 6, 16 and 20 different ones.
            assert!(distinct.len() >= [1, 2, 5, 5, 12, 15][round], "{distinct:?}");
        }
    }
}

/// Many rows at once have what each has alone; some draw, some take the greatest.
#[test]
fn rows_choose_as_each_alone() {
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(14));
        for (rows, len) in [(1, 1), (2, 7), (33, 1000), (70, 4099), (5, 50_001)] {
            let logits: Vec<f32> = random.normals(rows * len).iter().map(|v| v * 3.0).collect();
            let draws: Vec<Draw> = (0..rows)
                .map(|i| Draw {
                    temperature: [0.0, 1.0, 0.7][i % 3],
                    top_k: [0, 40, 0, 5][i % 4],
                    top_p: [1.0, 0.9][i / 2 % 2],
                    random: (random.bits() >> 11) as f64 / (1u64 << 53) as f64,
                })
                .collect();
            let run = |logits: &[f32], draws: &[Draw]| {
                let rows = draws.len();
                let values = bench.upload(logits);
                let [mut choice, mut drawn] = [(); 2].map(|()| bench.upload(&vec![9u32; 2 * rows]));
                let [mut tokens, mut positions] = [(); 2].map(|()| bench.upload(&vec![7u32; rows]));
                let step = Step {
                    logits: values.view(),
                    choice: choice.view_mut(),
                    tokens: tokens.view_mut(),
                    positions: positions.view_mut(),
                    advance: 2,
                    host: None,
                };
                nn::argmax(&gpu, &bench.stream, step).unwrap();
                let of = Drawn {
                    logits: values.view(),
                    choice: choice.view(),
                    drawn: drawn.view_mut(),
                    tokens: tokens.view_mut(),
                    host: None,
                };
                nn::sample(&gpu, &bench.stream, draws, of).unwrap();
                assert_eq!(bench.read(positions.view()), vec![9; rows]);
                [bench.read(choice.view()), bench.read(drawn.view()), bench.read(tokens.view())]
            };
            let [choice, drawn, tokens] = run(&logits, &draws);
            for (i, (logits, draw)) in logits.chunks_exact(len).zip(&draws).enumerate() {
                let [of_row, drawn_of_row, token] = run(logits, &[*draw]);
                let pair = 2 * i..2 * i + 2;
                assert_eq!((&choice[pair.clone()], &drawn[pair], tokens[i]), (&*of_row, &*drawn_of_row, token[0]));
                let first = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                assert_eq!(logits[of_row[0] as usize], first);
                assert!(draw.temperature > 0.0 || drawn_of_row == of_row);
            }
        }
    }
}

/// The host sees the tokens of a launch while the next one is in the stream, of any number of rows, again and again; a stream that left
/// none is an error.
#[test]
fn the_host_sees_tokens_one_launch_behind() {
    const ROWS: usize = 37;
    const LEN: usize = 900;
    for gpu in gpus() {
        let (bench, mut random) = (Bench::new(&gpu), Random(23));
        let stream = &bench.stream;
        let [mut likely, mut draws] = [(); 2].map(|()| HostTokens::new(&gpu, stream, ROWS).unwrap());
        let [mut choice, mut drawn] = [(); 2].map(|()| bench.upload(&[9u32; 2 * ROWS]));
        let [mut tokens, mut positions] = [(); 2].map(|()| bench.upload(&[7u32; ROWS]));
        let mut before: Option<(TokenPlaces, Vec<Option<u32>>, bool)> = None;
        for round in 0..60 {
            let rows = 1 + random.below(ROWS);
            let mut logits = random.normals(rows * LEN);
            let want: Vec<u32> = (0..rows).map(|_| random.below(LEN) as u32).collect();
            for (row, &at) in logits.chunks_exact_mut(LEN).zip(&want) {
                row[at as usize] = 40.0;
            }
            // Of all bits, as what stands where nothing was left.
            let lost = (round % 7 == 3).then(|| random.below(rows));
            if let Some(row) = lost {
                logits[row * LEN + want[row] as usize] = f32::from_bits(u32::MAX);
            }
            let values = bench.upload(&logits);
            likely.make_room(stream, rows).unwrap();
            let step = Step {
                logits: values.view(),
                choice: choice.view_mut().slice(0..2 * rows),
                tokens: tokens.view_mut().slice(0..rows),
                positions: positions.view_mut().slice(0..rows),
                advance: 1,
                host: Some(&likely),
            };
            nn::argmax(&gpu, stream, step).unwrap();
            let mut places = likely.launched(rows);
            let draw = round % 3 == 1;
            if draw {
                // So likely is the greatest that it is what is drawn.
                let of_row = Draw { temperature: 0.1, top_k: 0, top_p: 1.0, random: 0.5 };
                let of_rows: Vec<Draw> = (0..rows).map(|i| Draw { temperature: [0.1, 0.0][i % 2], ..of_row }).collect();
                draws.make_room(stream, rows).unwrap();
                let of = Drawn {
                    logits: values.view(),
                    choice: choice.view().slice(0..2 * rows),
                    drawn: drawn.view_mut().slice(0..2 * rows),
                    tokens: tokens.view_mut().slice(0..rows),
                    host: Some(&draws),
                };
                nn::sample(&gpu, stream, &of_rows, of).unwrap();
                places = draws.launched(rows);
            }
            let check = |(places, want, drew): (TokenPlaces, Vec<Option<u32>>, bool)| {
                let got = if drew { &draws } else { &likely }.wait(stream, &places).unwrap();
                assert_eq!(got.len(), want.len());
                for (i, (&(token, greatest), want)) in got.iter().zip(&want).enumerate() {
                    let right = want.map_or(greatest.is_nan(), |want| (token, greatest) == (want, 40.0));
                    assert!(right, "row {i} before round {round}: {token}, {greatest}, expected {want:?}");
                }
            };
            let mut want: Vec<Option<u32>> = want.into_iter().map(Some).collect();
            if let Some(row) = lost {
                want[row] = None;
            }
            // Now and then nobody asks, or asks at once.
            let last = before.replace((places, want, draw));
            if let Some(last) = last.filter(|_| round % 5 != 4) {
                check(last);
            }
            if round % 6 == 5 {
                before.take().into_iter().for_each(check);
            }
        }
        // What no launch leaves does not come.
        likely.make_room(stream, 2).unwrap();
        let places = likely.launched(2);
        assert!(likely.wait(stream, &places).is_err());
        let few = HostTokens::new(&gpu, stream, 1).unwrap();
        let step = Step {
            logits: choice.view().cast(),
            choice: drawn.view_mut(),
            tokens: tokens.view_mut(),
            positions: positions.view_mut(),
            advance: 0,
            host: Some(&few),
        };
        assert!(nn::argmax(&gpu, stream, step).is_err(), "more rows than the host has places for");
    }
}

/// Room that no launch followed, as where a step failed, is made again: of all rows, of fewer, and more often than there are places.
#[test]
fn room_for_tokens_is_made_again_where_no_launch_followed() {
    const ROWS: usize = 3;
    const LEN: usize = 50;
    for gpu in gpus() {
        let bench = Bench::new(&gpu);
        let stream = &bench.stream;
        let mut host = HostTokens::new(&gpu, stream, ROWS).unwrap();
        let mut choice = bench.upload(&[0u32; 2 * ROWS]);
        let [mut tokens, mut positions] = [(); 2].map(|()| bench.upload(&[0u32; ROWS]));
        let mut before: Option<(TokenPlaces, Vec<(u32, f32)>)> = None;
        for round in 0..12 {
            // None, one, two in vain, before the first launch too.
            for rows in [&[][..], &[ROWS], &[1, ROWS], &[ROWS, 2, 1]][round % 4] {
                host.make_room(stream, *rows).unwrap();
            }
            host.make_room(stream, ROWS).unwrap();
            let want: Vec<(u32, f32)> = (0..ROWS).map(|row| ((7 * round + row) as u32 % LEN as u32, 3.0)).collect();
            let mut logits = vec![0f32; ROWS * LEN];
            want.iter().enumerate().for_each(|(row, &(token, logit))| logits[row * LEN + token as usize] = logit);
            let values = bench.upload(&logits);
            let step = Step {
                logits: values.view(),
                choice: choice.view_mut(),
                tokens: tokens.view_mut(),
                positions: positions.view_mut(),
                advance: 1,
                host: Some(&host),
            };
            nn::argmax(&gpu, stream, step).unwrap();
            let places = host.launched(ROWS);
            // What came last is still there, whatever came to nothing after it.
            for (places, want) in before.replace((places, want)).iter().chain(&before) {
                assert_eq!(host.wait(stream, places).unwrap(), *want, "round {round}");
            }
        }
    }
}
