"""Scenes that many plots share: meetings, feelings, how a story closes."""

MEETING = """
meet_pal
- There {he} met {a_pal} [named|called] {pal}.
- {A_pal} named {pal} was [there|<in_place>|near {landmark}] too.
- {A_pal} came [along|closer|by|from the {shop}]. "{hello}, I am {pal}," {pal_he} [said|{replied} and
  {pal_quirk}].
- [On the way|Near {landmark}|A little later|Then] {he} met {pal}, {a_pal}.
- {pal}, {a_pal}, was [waiting|sitting|reading|singing] {place1}.

with_pal
- {His} [best|oldest|good|only|dear] friend was {pal}, {a_pal}.
- <hero> had a [best|good|dear|new|true] friend, {a_pal} named {pal}.
- [Next door|Near {landmark}|Not far from the <house>|Behind the {shop}] lived {pal}, {a_pal}, who {liked}
  [to play {game}|<food>].
- <hero> [did everything|played {game}|shared everything|went everywhere|ate <food>] with {pal}, {a_pal}.
- {A_pal} [named|called] {pal} was {his} friend, and <hero> and {pal} [met|played {game}|ate <food>|sang]
  every {time} [<in_place>|near {landmark}].
- The friend of <hero> was {pal}, {a_pal} who {pal_quirk} [a lot|every {time}|all the time].
- {pal}, {a_pal}, [came to|knocked at|waited at] the <house> every {time} [to play {game}|to see {hero}|with
  {goods} from the {shop}].

hello
- "{hello}, {hero}!" <pal_said>.
- "{hello}, {pal}!" <hero_said>.
- {hero} waved at {pal} with {his} <wear>.
- "{hello}! Are you {pal}?" asked {hero}.

arrive
- <hero> <walked> to the <place>[ with <elder>|], where {he} saw {place_sight}.
- <he> <walked> past {landmark} [all the way |]to the <place>.
- <hero> {liked} it <in_place>, because there {he} could see {place_sight}.
- <hero> [put on|took] {his} <wear> and <walked> to the <place> to look at {place_sight}.
- <elder> took <hero> to the <place> to [see|show {him}|look at] {place_sight}.

thing_play
- <hero> {thing_did} {his} <thing> {thing_how}.
- <in_place> {he} {thing_did} {his} <thing> [all {time}|for an hour|{number} times].
- "Look how I {thing_do} my {thing}!" <hero_said>.
- <hero> took out {his} <thing> and {thing_did} <thing_how>.

ask_elder
- "What [is wrong|happened|is the matter], {hero}?" asked <elder>.
- <elder> saw {his} [face|eyes|tears] and asked, "Why are you so {sad}, {hero}?"
- "Come here, {hero}," <elder_said>. "Tell me [everything|all about it|what happened]."
- <hero> <walked> to <elder> and told {elder_him} [everything|the whole story|what had happened].

comfort
- <elder> hugged <hero> and {replied}, "We will find a way."
- <elder> dried {his} tears with {his} <wear>.
- "Do not be {sad}," <elder_said>. "Remember, {proverb}."
- <elder> made some <food>, and that helped a little.
- "You know what I always say," <elder_said>. "{Proverb}."

thanks
- "Thank you, {pal}!" <hero_said>.
- <hero> hugged <pal> [tightly|twice|{number} times].
- "You are a true friend, {pal}," <hero_said>.
- "How can I thank you?" asked <hero>. <pal> only {laughed}.
"""

FEELINGS = """
glad
- <hero> was {very} {happy}[ and {hero_quirk}|, and so was <pal>|].
- <hero> {laughed} and [hugged <pal>|clapped|danced around <pal>|threw {his} <wear> in the air|kissed <pal>
  on the cheek].
- "{wow}!" <hero_said>. "[What a {day}|This is wonderful|I am so {happy}|I must tell {elder}]!"
- Nobody in {town} was as {happy} as <hero>[ on that {day}|].
- {His} heart felt as light as [a feather|a cloud|a leaf|the wind], and {he} [hugged|thanked|kissed] <pal>.
- "{wow}!" <hero_said>, and <pal> {laughed} too.
- <pal> {laughed}, <hero> {laughed}, and they danced around [{landmark}|the <house>|the {place}].

gloom
- <hero> was {very} {sad}[ and {hero_quirk}|].
- <hero> felt {sad} and pulled {his} <wear> over {his} [eyes|ears|head|face].
- "[Oh no|Oh dear|No, no]!" <hero_said>. "[What shall I do?|This is terrible!|My poor {thing}!|What will
  {elder} say?]"
- <he> sat down {place1} and [cried|thought of {elder}|{hero_quirk}].
- Big tears fell on {his} <wear>.
- {hero} {hero_surname} had never been so {sad} before.

fright
- <hero> was {very} {scared}[ and {hero_quirk}|].
- {His} knees [shook|trembled|knocked], and {he} [held on to|hid under|pulled at] {his} <wear>.
- "I am {scared}," whispered <hero>[ to {himself}.|. "I want to go back to {elder}."|.]
- <hero> hid behind [a tree|{his} <wear>|both hands].
- {His} heart went [boom|thump|bang|knock], [boom|thump|bang|knock], [boom|thump|bang|knock].
- "{elder}!" {said} <hero>, but <elder> was far away.

pal_gloom
- <pal> was {very} {sad} and [sat down|hid|cried] {place2}.
- <pal> turned around and <walked> away.
- Tears ran down the face of <pal>.
- "That is not [fair|nice|kind], {hero}," <pal_said>.
- <pal> said nothing, but {pal_he} looked {sad}.

shame
- <hero> saw that <pal> was {sad}, and {he} felt bad.
- That {time} <hero> could not eat {his} <food>.
- <hero> thought about <pal> all {time}.
- <hero> lay in bed and remembered how {sad} <pal> had been.

sorry
- "I am sorry, {pal}," <hero_said>. "I was [wrong|unkind|mean|selfish]."
- <hero> <walked> back to <pal>. "Please forgive me," {he} [said|begged].
- "I should not have done that," <hero_said>. "Are we still friends, {pal}?"
- <hero> {gave} <pal> {his} <wear> and said that {he} was sorry.

forgive
- "It is all right, {hero}," <pal_said>.
- <pal> {laughed} and took {his} hand.
- "Of course, {hero}," <pal_said>. "Let us play {game}!"
- <pal> thought for a moment. "I forgive you," {pal_he} {replied}.

together
- <hero> and <pal> played {game} [until {number} o'clock|near {landmark}|all {time}|until <elder> called].
- They shared some <food> and {laughed} [a lot|about {neighbor}|until {number} o'clock].
- <pal> and <hero> spent the [whole|rest of the] {time} <in_place>.
- They {thing_did} the <thing> {thing_how}, first <hero> and then <pal>.
"""

CLOSING = """
closing
- <evening> <moral>
- <moral> <ever_after>
- <evening> <ever_after>
- <ever_after>
- <moral>
- <evening> <moral> <ever_after>

evening
- <evening:time>
evening:morning
- By noon <hero> was back <in_place> with <pal>.
- At lunch there was <food>, and <hero> told <elder> [everything|about <pal>|about {neighbor}|the whole
  story].
- The rest of that {weather_look} {day} [went by|passed] like [a song|a dream|one minute].
- It was not even noon when <hero> and <pal> sat [in front of the <house>|near {landmark}|in the {shop}].
- At {number} o'clock <elder> called them to the <house> for <food>.
evening:afternoon
- When the sun went down behind {landmark}, <hero> was still {happy}.
- For dinner <elder> [made|cooked|bought] <food> for <hero> and <pal>.
- At sunset the sky over {town} turned [pink|red|golden|purple] like the <wear> of {hero}.
- In the evening <hero> told <elder> [everything|about <pal>|about {neighbor}|the whole story].
- Late that {day}, <pal> and <hero> sat near {landmark} and ate <food>.
evening:evening
- The moon [came up|rose|climbed] over {landmark}, and <hero> [yawned|{hero_quirk}|took off {his} <wear>].
- <elder> tucked <hero> in, with {his} <wear> on the [chair|bed|door].
- That night <hero> dreamed of {place_sight} [and <food>|and of <pal>|and of {a_other}].
- Then the stars came out over [{town}|{landmark}|the <house>|the {place}].
- In the <house> <elder> lit a [lamp|candle|fire], and <hero> told {elder_him} about <pal>.

moral
- "What did you learn [today|this {day}|from {pal}], {hero}?" asked <elder>. "That <lesson:plot>,"
  <hero_said>.
- <hero> had learned [something|a lesson] [that {day}|from <pal>|<in_place>]: <lesson:plot>.
- "{Proverb}," <elder_said>.
- <hero> never forgot what <elder> {replied} [then|to <pal>|that {time}|<in_place>]: "{Proverb}."
- And so <hero> [learned|saw|found out] that <lesson:plot>.
- <pal> and <hero> both [knew now|understood|told everybody in {town}|told <elder>] that <lesson:plot>.
- "{Proverb}," <hero_said>, and <elder> [nodded|agreed|{laughed}|{elder_quirk}].

ever_after
- From that {day} on, <hero> and <pal> [played {game} every {time}|were the best of friends|met near
  {landmark} every {time}|often ate <food> together].
- [Visit|Come to|Pass through] {town} on {a_weather} {day}, and [you may still see {his} {whole_wear}|ask
  for <hero>|look out for <pal>].
- <hero> and <pal> still [talk|think|laugh|sing] about that {weather_look} {day}[ <in_place>|].
- After that, <hero> was as {hero_trait} as [ever|before], and <pal> was just as {pal_trait}.
- And {hero}, {pal} and {elder} [ate|shared|finished] <food> [together|in the <house>|near {landmark}]. The
  end.
- And {hero} and {pal} [lived happily|were {happy}|stayed friends] in {town}.[ The end.|]
- {neighbor} the {job} still tells [this story|about <hero>|about <pal>] to [everybody who comes to|the
  people in|the children at] the {shop}.
"""

SCENES = (MEETING, FEELINGS, CLOSING)
